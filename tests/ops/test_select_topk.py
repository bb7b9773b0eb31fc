"""select_topk: native kernel against the plain JAX reference, on every instruction set, and edges of k and range."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import _host
from clo_jax.ops import hash_encode
from clo_jax.ops import select_topk as op
from tests.cases import DTYPES, GROUPS, LENGTHS
from tests.compare import on_cpu

ISAS = ("generic", "avx2", "avx512")
SHAPES = tuple(zip(GROUPS, (64, 80, 96, 128, 256, 64, 128, 64), (32, 64, 96, 128, 256, 288, 256, 128), strict=True))


def inputs(seed, B=3, Ko=2, G=3, D=64, R=128, S=333, dtype=jnp.float32, k_max=None):
    """Random keys and their codes. Queries and weights are small multiples of powers of two, so that their products are
    exact in float32 and the query's levels and bits equal the reference's whatever the order of summation."""
    r = np.random.default_rng(seed)
    weights = jnp.asarray(r.integers(-8, 9, size=(Ko, D, R)) / 64, jnp.float32)
    query = jnp.asarray(r.integers(-8, 9, size=(B, Ko * G, D)) / 4, dtype)
    mean = jnp.asarray(r.normal(size=(B, Ko, D)), jnp.float32)
    rows = jnp.asarray(np.asarray(mean)[:, :, None, None] + r.normal(size=(B, Ko, S, 2, D)), dtype)
    codes, factors = hash_encode.hash_encode(rows[:, :, :, 0], weights, mean)
    lengths = jnp.asarray(r.integers(S // 2, S + 1, size=B), jnp.int32)
    operands = dict(
        query=query,
        weights=weights,
        mean=mean,
        lse=jnp.asarray(r.normal(size=(B, Ko * G)) + 4, jnp.float32),
        codes=codes,
        factors=factors,
        begin=jnp.asarray(r.integers(0, S // 4 + 1, size=B), jnp.int32),
        end=lengths,
        k=lengths // 8,
        skip=jnp.zeros((B, Ko), jnp.bool_),
    )
    return operands, rows, dict(k_max=k_max or S, scale=D**-0.5)


def with_rows(retriever, rows, static):
    return dict(static, retriever=retriever, rows=rows if retriever == "exact" else None)


def reference_keys(operands, static):
    names = ("query", "weights", "mean", "lse", "codes", "factors")
    statics = {name: static[name] for name in ("retriever", "scale", "rows")}
    return np.asarray(on_cpu(jax.jit(lambda *a: op.sort_keys(*a, **statics)))(*(operands[n] for n in names)))


def assert_selects(got, operands, keys, k_max, slack):
    """Right size, order and range, and no key left out that beats a chosen one by more than `slack` units.

    Returns how many indices differ from the selection by `keys` alone, and how many there are."""
    got, differing, total = np.asarray(got), 0, 0
    for b in range(got.shape[0]):
        begin, end = max(int(operands["begin"][b]), 0), min(int(operands["end"][b]), keys.shape[-1])
        for h in range(got.shape[1]):
            count = 0 if operands["skip"][b, h] else max(min(int(operands["k"][b]), k_max, end - begin), 0)
            chosen = got[b, h, :count]
            assert (got[b, h, count:] == -1).all()
            assert (np.diff(chosen) > 0).all()
            if count == 0:
                continue
            assert begin <= chosen[0] and chosen[-1] < end
            mine = keys[b, h, begin:end]
            left = np.setdiff1d(np.arange(end - begin), chosen - begin)
            if left.size:
                assert mine[chosen - begin].min() >= mine[left].max() - slack
            best = np.sort(np.argsort(-mine, kind="stable")[:count]) + begin
            differing += np.setdiff1d(chosen, best).size
            total += count
    return differing, total


def check(operands, static):
    """The native kernel and the plain form, both against the plain form's keys."""
    keys, hata = reference_keys(operands, static), static["retriever"] == "hata"
    got = op.select_topk(**operands, **static)
    differing, total = assert_selects(got, operands, keys, static["k_max"], 0 if hata else 2)
    assert differing <= (0 if hata else max(1, total // 1000))
    return got, keys, total


@pytest.mark.parametrize("retriever", op.RETRIEVERS)
@pytest.mark.parametrize("G, D, R", SHAPES)
def test_matches_reference(G, D, R, retriever):
    dtype = DTYPES[(G + op.RETRIEVERS.index(retriever)) % 2]
    operands, rows, static = inputs(G, G=G, D=D, R=R, dtype=dtype)
    static = with_rows(retriever, rows, static)
    _, keys, total = check(operands, static)
    assert total > 0
    want = on_cpu(jax.jit(lambda o: op.reference(**o, **static)))(operands)
    assert assert_selects(want, operands, keys, static["k_max"], 0)[0] <= 1  # (jitted apart from its keys)


@pytest.mark.parametrize("retriever", op.RETRIEVERS)
def test_lengths_and_k(retriever):
    operands, rows, static = inputs(1, B=6, S=max(LENGTHS))
    static = with_rows(retriever, rows, static)
    for n in LENGTHS:
        for begin in {0, min(4, n - 1), n}:
            m = n - begin
            operands = dict(
                operands,
                begin=jnp.full((6,), begin, jnp.int32),
                end=jnp.full((6,), n, jnp.int32),
                k=jnp.asarray([-1, 0, 1, m - 1, m, m + 1], jnp.int32),
            )
            check(operands, static)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("retriever", op.RETRIEVERS)
def test_thousands_of_tokens(retriever, dtype):
    operands, rows, static = inputs(2, B=2, R=256, S=9001, dtype=dtype, k_max=900)
    got, _, total = check(operands, with_rows(retriever, rows, static))
    assert total > 1000
    again = op.select_topk(**operands, **with_rows(retriever, rows, static))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(again))


def test_range_is_cut_to_the_capacity():
    operands, rows, static = inputs(3)
    wide = dict(operands, begin=jnp.full((3,), -5, jnp.int32), end=jnp.full((3,), 1000, jnp.int32))
    full = dict(operands, begin=jnp.zeros((3,), jnp.int32), end=jnp.full((3,), 333, jnp.int32))
    static = with_rows("sign", rows, static)
    np.testing.assert_array_equal(
        np.asarray(op.select_topk(**wide, **static)), np.asarray(op.select_topk(**full, **static))
    )


@pytest.mark.parametrize("retriever", op.RETRIEVERS)
def test_equal_keys_go_to_the_lowest_index(retriever):
    operands, rows, static = inputs(4)
    same = {name: jnp.broadcast_to(operands[name][:, :, :1], operands[name].shape) for name in ("codes", "factors")}
    operands = dict(operands, **same, k=jnp.full((3,), 70, jnp.int32))
    got = op.select_topk(**operands, **with_rows(retriever, jnp.broadcast_to(rows[:, :, :1], rows.shape), static))
    want = np.asarray(operands["begin"])[:, None, None] + np.arange(70)
    np.testing.assert_array_equal(np.asarray(got)[:, :, :70], np.broadcast_to(want, (3, 2, 70)))


@pytest.mark.parametrize("retriever", op.RETRIEVERS)
def test_skipped_heads_select_nothing(retriever):
    operands, rows, static = inputs(5)
    static = with_rows(retriever, rows, static)
    full = np.asarray(op.select_topk(**operands, **static))
    skip = np.array([[True, False], [False, True], [True, True]])
    got = np.asarray(op.select_topk(**dict(operands, skip=jnp.asarray(skip)), **static))
    np.testing.assert_array_equal(got, np.where(skip[:, :, None], -1, full))


def test_the_likeliest_token_is_found():
    operands, rows, static = inputs(6, G=1, R=256, dtype=jnp.float32)
    target = np.arange(6).reshape(3, 2) * 40 + 90
    rows = np.array(rows)
    for b in range(3):
        for h in range(2):
            rows[b, h, target[b, h], 0] = 2 * np.asarray(operands["query"])[b, h]
    codes, factors = hash_encode.hash_encode(jnp.asarray(rows[:, :, :, 0]), operands["weights"], operands["mean"])
    operands = dict(
        operands, codes=codes, factors=factors, k=jnp.ones((3,), jnp.int32), end=jnp.full((3,), 333, jnp.int32)
    )
    for retriever in ("sign", "exact"):
        got = op.select_topk(**operands, **with_rows(retriever, jnp.asarray(rows), static))
        np.testing.assert_array_equal(np.asarray(got)[:, :, 0], target)


@pytest.mark.parametrize("retriever", ("sign", "exact"))
@pytest.mark.parametrize("lse", (-1e30, 1e30, jnp.inf, -jnp.inf, jnp.nan))
def test_extreme_scores_select_all_the_same(retriever, lse):
    """Scores that all overflow or vanish are equal, so the first k tokens win; nothing is out of range."""
    operands, rows, static = inputs(7)
    operands["lse"] = jnp.full_like(operands["lse"], lse)
    got, _, _ = check(operands, with_rows(retriever, rows, static))
    want = np.asarray(operands["begin"]) + np.asarray(operands["k"]) - 1
    np.testing.assert_array_equal(np.asarray(got).max(-1), np.broadcast_to(want[:, None], (3, 2)))


@pytest.mark.gpu
def test_exact_on_a_gpu_refuses_keys_that_it_cannot_read():
    operands, rows, static = inputs(7, D=66, dtype=jnp.bfloat16)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="clo_select_topk: exact on a GPU wants"):
        jax.block_until_ready(op.select_topk(**operands, **with_rows("exact", rows, static)))


def test_zero_query_and_factors():
    operands, rows, static = inputs(8)
    for zero in ("query", "factors"):
        check(dict(operands, **{zero: jnp.zeros_like(operands[zero])}), with_rows("sign", rows, static))


def isa_results():
    """What every instruction set must agree on; also run in a subprocess."""
    results = {}
    for R in (96, 256):
        operands, rows, static = inputs(9, B=2, Ko=3, G=4, R=R, S=5000, k_max=700)
        results[f"codes {R}"] = operands["codes"]
        encoded = hash_encode.reference(rows[:, :, :, 0], operands["weights"], operands["mean"])
        operands["codes"], operands["factors"] = encoded
        for retriever in op.RETRIEVERS:
            results[f"{retriever} {R}"] = op.select_topk(**operands, **with_rows(retriever, rows, static))
    return {name: np.asarray(value) for name, value in results.items()}


def in_subprocess(path, code, **environment):
    """On the CPU, whatever this process runs on."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); path = {str(path)!r}\n{code}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("threads", ("1", "4"))
@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_and_thread_counts_agree(isa, threads, tmp_path):
    if ISAS.index(isa) > ISAS.index(_host.instruction_set()):
        pytest.skip(f"this machine has no {isa}")
    done = in_subprocess(
        tmp_path / "out.npz",
        "import numpy; from tests.ops import test_select_topk as t\n"
        "numpy.savez(path, isa=t._host.instruction_set(), **t.isa_results())",
        CLO_JAX_ISA=isa,
        CLO_JAX_THREADS=threads,
    )
    assert done.returncode == 0, done.stderr
    theirs = np.load(tmp_path / "out.npz")
    assert str(theirs["isa"]) == isa
    for name, mine in isa_results().items():
        if isa == _host.instruction_set() or name.startswith("hata"):  # the first: only the number of threads differs
            np.testing.assert_array_equal(mine, theirs[name])
        elif name.startswith("codes"):  # bits of projections that are 0 up to rounding
            assert np.bitwise_count(mine ^ theirs[name]).sum() <= mine.size * 32 // 1000
        else:
            pairs = zip(mine.reshape(-1, mine.shape[-1]), theirs[name].reshape(-1, mine.shape[-1]), strict=True)
            assert sum(np.setdiff1d(a, b).size for a, b in pairs) <= mine.size // 1000


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("CLO_JAX_ISA", "sse9", "CLO_JAX_ISA: got 'sse9', wanted generic, avx2 or avx512"),
        ("CLO_JAX_THREADS", "many", "CLO_JAX_THREADS: got 'many', wanted an integer"),
    ],
)
def test_bad_environment_is_an_error(name, value, message, tmp_path):
    code = "from tests.ops import test_select_topk as t; t.isa_results()"
    done = in_subprocess(tmp_path, code, **{name: value})
    assert done.returncode != 0 and message in done.stderr


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(query=jnp.zeros((3, 7, 64))), "query heads: got 7, wanted a positive multiple of KV heads = 2"),
        (dict(query=jnp.zeros((3, 6, 64), jnp.int32)), "query: got dtype int32, wanted float32 or bfloat16 or float16"),
        (dict(weights=jnp.zeros((2, 64, 33))), "weights' hash bits: got 33"),
        (dict(weights=jnp.zeros((2, 64, 32768))), "G·R: got 98304, wanted less than 65536"),
        (
            dict(codes=jnp.zeros((3, 2, 333, 3), jnp.uint32)),
            r"codes: got shape \(3, 2, 333, 3\), wanted \[B, Ko, S, R/32\]",
        ),
        (dict(factors=jnp.zeros((3, 2, 333))), "factors: got dtype float32, wanted float16"),
        (dict(lse=jnp.zeros((3, 2))), r"lse: got shape \(3, 2\)"),
        (dict(k=jnp.zeros((3,))), "k: got dtype float32, wanted int32"),
        (dict(skip=jnp.zeros((3, 2), jnp.int32)), "skip: got dtype int32, wanted bool"),
        (dict(k_max=0), r"k_max: got 0, wanted an integer in \[1, S = 333\]"),
        (dict(k_max=334), "k_max: got 334"),
        (dict(retriever="best"), "retriever: got 'best', wanted sign, hata, exact"),
        (dict(retriever="exact"), "rows: got None with retriever 'exact'"),
        (dict(rows=jnp.zeros((3, 2, 333, 2, 64))), "rows: got an array with retriever 'sign'"),
        (dict(retriever="exact", rows=jnp.zeros((3, 2, 333, 64))), r"rows: got shape \(3, 2, 333, 64\)"),
    ],
)
def test_bad_arguments_are_named(change, message):
    operands, rows, static = inputs(0)
    with pytest.raises(ValueError, match=message):
        op.select_topk(**{**operands, **with_rows("sign", rows, static), **change})
