// Which instruction set the kernels use, chosen once at run time.
//
// To add a set of primitives NAME: declare a struct NameTable of function pointers and its three makers in NAME.h;
// implement it in NAME_body.cc, which is compiled once per instruction set and defines CLO_TABLE(name)(); add an accessor
// to dispatch.cc. Body files use raw pointers, static functions and vector.h, never the standard library's templates.
#pragma once

namespace clo {

struct CodesTable;
struct RowsTable;
struct ScoresTable;

// generic (x86-64-v2, or whatever another architecture has), avx2 (x86-64-v3) or avx512 (v4 with VPOPCNTDQ, VBMI, VNNI:
// Ice Lake, Zen 4 and later): the best that this machine has, or what CLO_JAX_ISA names. Throws std::invalid_argument
// when CLO_JAX_ISA is unknown or not supported here.
const char* isa_name();

const CodesTable& codes_table();
const RowsTable& rows_table();
const ScoresTable& scores_table();

}  // namespace clo
