set -u
export CUDA_MODULE_LOADING=EAGER JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_MEM_FRACTION=.06 JAX_DEFAULT_MATMUL_PRECISION=highest XLA_FLAGS=--xla_gpu_autotune_level=0 PYTHONUNBUFFERED=1
( cmake -S ffi -B build/gpu -G Ninja -DCLO_PYTHON=OFF -DCLO_BUILD_TESTS=ON -DCLO_ENABLE_CUDA=ON && cmake --build build/gpu -j 12 --target gpu_test_pull gpu_test_prefetch gpu_test_offload ) >$OUT/build.log 2>&1 || grep -E "error" $OUT/build.log | head
(timeout 100 python3 -m pip install -q --no-build-isolation --no-deps -e . -C cmake.define.CLO_ENABLE_CUDA=ON >$OUT/pip.log 2>&1; echo pip rc $?) 
for t in gpu_test_pull gpu_test_prefetch gpu_test_offload; do s=$SECONDS; timeout 60 build/gpu/$t 2>&1 | tail -3; echo "$t rc ${PIPESTATUS[0]} $((SECONDS-s)) s"; done
P="timeout -k 5 150 python3 -m pytest -q --no-header -p no:cacheprovider -p no:benchmark --timeout 70 --tb=short"
$P -n 4 tests/policies/test_clo.py >$OUT/clo.log 2>&1 & A=$!
$P -n 3 tests/ops/test_prefetch.py tests/ops/test_offload.py >$OUT/ops.log 2>&1 & B=$!
$P -n 3 tests/test_generate.py >$OUT/generate.log 2>&1 & C=$!
wait $A $B $C
for f in clo ops generate; do echo "== $f"; grep -E "^(FAILED|ERROR|E  )" $OUT/$f.log | cut -c1-220 | sort | uniq -c | sort -rn | head -22; tail -n 2 $OUT/$f.log | cut -c1-300; done
