#!/usr/bin/env bash
# Builds and checks everything that needs an NVIDIA GPU, on a machine that has one, nvcc, cmake, ninja and a Python with
# JAX for CUDA and the build tools, and no network. A short table comes last; results files and one log go to OUT.
#
#   tools/gpu_check.sh [native] [sanitizer] [bench] [python]      (all four when none is named)
#   tools/gpu_check.sh headline recall      the project's goals, asked for by name: minutes each
#
# Environment: OUT, a folder for results and logs.txt (default build/gpu-check); PYTHON (default python3); JOBS, of
# compilers; WORKERS, of pytest; SUITES, paths of suites; RUNS of headline (ablation, rivals and transformers, too); CHAINS of
# recall, a length; CLO_JAX_* as in CONTRIBUTING.md.
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
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_MEM_FRACTION=${MEM_FRACTION:-.045} JAX_DEFAULT_MATMUL_PRECISION=highest
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

# One build of everything: the Python module, native tests and benches.
step build 300 env CMAKE_BUILD_PARALLEL_LEVEL="$JOBS" "$PYTHON" -m pip install --no-build-isolation --no-deps -e . \
  -C build-dir=build/gpu -C cmake.define.CLO_ENABLE_CUDA=ON -C cmake.define.CLO_BUILD_TESTS=ON ||
  { printf '%s\n' "${SUMMARY[@]}"; exit 1; }
if has native; then
  for test in build/gpu/gpu_test_*; do step "$(basename "$test")" 120 "$test"; done
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
  # suite NAME ARGUMENTS...: a bench of the command line becomes h200-NAME.json.
  suite() {
    local name=$1
    shift
    XLA_PYTHON_CLIENT_MEM_FRACTION=.6 JAX_DEFAULT_MATMUL_PRECISION=default step "bench_$name" "${BENCH_LIMIT:-90}" \
      "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/clo-jax" bench "$name" --shape llama3-8b \
      --layers 4 "$@" --json "$OUT/h200-$name.json" && cat "$LOGS/bench_$name.log"
  }
  suite layer --repeats 3
  suite decode --attention clo --hits replayed
  suite prefill --repeats 3
fi
if has sanitizer; then
  # TOOL PROGRAM: "small" leaves out what waits for a kernel beside it, because a sanitizer holds kernels back.
  sanitize() {
    timeout 200 compute-sanitizer --tool "$1" --error-exitcode 9 "$2" small >"$LOGS/$1-${2##*/}.log" 2>&1
    local rc=$?
    echo "$1 ${2##*/}: exit $rc, $(tail -n 1 "$LOGS/$1-${2##*/}.log")"
    return $rc
  }
  export -f sanitize
  export LOGS
  # Beside the suites, which measure nothing either.
  for tool in memcheck racecheck; do for test in build/gpu/gpu_test_*; do echo "$tool $test"; done; done |
    xargs -P 4 -L 1 bash -c 'sanitize "$0" "$1"' >"$LOGS/sanitizer.log" 2>&1 &
  sanitizer=$!
fi
if has headline; then
  for run in ${RUNS:-128k early timeline always qwen growth 1m}; do
    case $run in
      timeline) bench=(clo_jax.bench.timeline "$OUT/h200-timeline.json") ;;
      ablation) bench=(clo_jax.bench.ablation_speed "$OUT/h200-ablation.json") ;;
      transformers) bench=(clo_jax.bench.transformers_decode "$OUT/h200-transformers.json" --compare "$OUT/h200-128k.json") ;;
      *) bench=(clo_jax.bench.headline "$run" "$OUT/h200-$run.json") ;;
    esac
    XLA_PYTHON_CLIENT_MEM_FRACTION=.75 JAX_DEFAULT_MATMUL_PRECISION=default step "headline-$run" "${BENCH_LIMIT:-400}" \
      "$PYTHON" -m "${bench[@]}"
    cat "$LOGS/headline-$run.log"
  done
fi
if has python; then
  # Several processes share the GPU where pytest-xdist is there; compiling is most of the time.
  workers=()
  "$PYTHON" -c 'import xdist' 2>"$LOGS/xdist.log" && workers=(-n "${WORKERS:-$(nproc)}" --dist worksteal -p no:benchmark)
  CUDA_MODULE_LOADING=LAZY XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0" step suites "${SUITE_LIMIT:-240}" \
    "$PYTHON" -m pytest -q --no-header -p no:cacheprovider --tb=short --timeout 100 "${workers[@]}" -m "not slow and not live" \
    ${SUITES:-tests/ops tests/transfer/test_gpu.py tests/policies/test_clo.py tests/test_generate.py tests/test_memory.py tests/test_llm.py
      tests/test_llm_gpu.py}
fi
if has sanitizer; then
  if wait "$sanitizer"; then SUMMARY+=("sanitizer                    ok"); else SUMMARY+=("sanitizer                    FAILED"); fi
  cat "$LOGS/sanitizer.log"
fi
if has recall; then
  # The small model that looks up: trained here, then asked up to 128K tokens.
  export JAX_DEFAULT_MATMUL_PRECISION=default XLA_PYTHON_CLIENT_MEM_FRACTION=.6
  step recall-training 590 "$PYTHON" -m clo_jax.eval.recall "$OUT/recall-qwen" &&
    step recall "${BENCH_LIMIT:-560}" "$PYTHON" -m clo_jax.bench.recall "$OUT/recall-qwen" --samples "${CHAINS:-64}" \
      --sparsity 0.1 --folder "$OUT/answers" --out "$OUT/recall-qwen-accuracy.json"
fi
echo
printf '%s\n' "${SUMMARY[@]}"
! printf '%s\n' "${SUMMARY[@]}" | grep -q FAILED
