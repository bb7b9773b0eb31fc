#!/usr/bin/env bash
# Builds and checks everything that needs an NVIDIA GPU, on a machine that has one, nvcc, cmake, ninja and a Python with
# JAX for CUDA and the build tools, and no network. A short table comes last; results files and one log go to OUT.
#
#   tools/gpu_check.sh [native] [sanitizer] [bench] [python]      (all four when none is named)
#
# Environment: OUT, a folder for results and logs.txt (default build/gpu-check); PYTHON (default python3); JOBS, of
# compilers; WORKERS, of pytest; SUITES, paths of suites; CLO_JAX_* as in CONTRIBUTING.md.
set -u
shopt -s nullglob
cd "$(dirname "$0")/.."
OUT=$(mkdir -p "${OUT:-build/gpu-check}" && cd "${OUT:-build/gpu-check}" && pwd)
LOGS=$(mktemp -d)
trap 'for log in "$LOGS"/*.log; do echo "=== ${log##*/}"; cat "$log"; done >"$OUT/logs.txt"; rm -rf "$LOGS"' EXIT
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-$(nproc)}
# Kernels that are loaded on their first launch wait for those that run.
export CUDA_MODULE_LOADING=EAGER
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_MEM_FRACTION=${MEM_FRACTION:-.06} JAX_DEFAULT_MATMUL_PRECISION=highest
PARTS=${*:-native sanitizer bench python}
SUMMARY=()

# step NAME SECONDS COMMAND...: runs it bounded, keeps its log, notes how it ended; a failure prints the log's end.
step() {
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  if timeout -k 5 "$limit" "$@" >"$LOGS/$name.log" 2>&1; then
    SUMMARY+=("$(printf '%-28s ok      %4d s  %s' "$name" $((SECONDS - start)) "$(tail -n 1 "$LOGS/$name.log" | cut -c1-100)")")
  else
    local rc=$?
    SUMMARY+=("$(printf '%-28s FAILED  %4d s  exit %d' "$name" $((SECONDS - start)) "$rc")")
    echo "--- $name"
    tail -n "${LOG_LINES:-40}" "$LOGS/$name.log"
    return 1
  fi
}

has() { [[ " $PARTS " == *" $1 "* ]]; }

if has native || has sanitizer || has bench; then
  native_build() {
    cmake -S ffi -B build/gpu -G Ninja -DCLO_PYTHON=OFF -DCLO_BUILD_TESTS=ON -DCLO_ENABLE_CUDA=ON &&
      cmake --build build/gpu -j "$JOBS" -- -k 0
  }
  export -f native_build
  export JOBS
  step native-build 240 bash -c native_build || { printf '%s\n' "${SUMMARY[@]}"; exit 1; }
fi
if has native; then
  for test in build/gpu/gpu_test_*; do step "$(basename "$test")" 120 "$test"; done
fi
if has sanitizer; then
  # They hold kernels back: "small" leaves out what waits for a kernel beside it.
  for tool in memcheck racecheck; do
    for test in build/gpu/gpu_test_*; do
      name=$(basename "$test")
      step "$tool-$name" 120 compute-sanitizer --tool "$tool" --error-exitcode 9 "$test" small
    done
  done
fi
if has python; then
  # Several processes share the GPU where pytest-xdist is there; compiling is most of the time.
  workers=()
  "$PYTHON" -c 'import xdist' 2>"$LOGS/xdist.log" && workers=(-n "${WORKERS:-6}" -p no:benchmark)
  step python-build 240 "$PYTHON" -m pip install -q --no-build-isolation --no-deps -e . -C cmake.define.CLO_ENABLE_CUDA=ON
  for suite in ${SUITES:-tests/transfer/test_gpu.py tests/policies/test_clo.py tests/test_generate.py tests/ops}; do
    step "$(echo "$suite" | tr '/' '-' | sed 's/\.py$//')" "${SUITE_LIMIT:-180}" \
      "$PYTHON" -m pytest -q --no-header -p no:cacheprovider --tb=short --timeout 100 "${workers[@]}" \
      -m "not slow and not live" "$suite"
  done
fi
if has bench; then
  # results WHAT BENCH...: runs native benches; their figures together become h200-WHAT.json.
  results() {
    local what=$1 logs=()
    shift
    for bench; do step "$bench" 120 "build/gpu/$bench" && logs+=("$LOGS/$bench.log"); done
    ((${#logs[@]})) && step "results-$what" 60 "$PYTHON" -m clo_jax.bench.native "$what" "$OUT/h200-$what.json" "${logs[@]}" &&
      cat "$LOGS/results-$what.log"
  }
  results kernels bench_attend bench_select bench_prefetch
  results transfer bench_transfer
  XLA_PYTHON_CLIENT_MEM_FRACTION=.6 JAX_DEFAULT_MATMUL_PRECISION=default \
    step bench_layer "${LAYER_LIMIT:-120}" "$PYTHON" -m clo_jax.bench.layer --out "$OUT/h200-layer.json" &&
    cat "$LOGS/bench_layer.log"
fi
echo
printf '%s\n' "${SUMMARY[@]}"
! printf '%s\n' "${SUMMARY[@]}" | grep -q FAILED
