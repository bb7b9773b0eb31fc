# Two commands need nothing prepared but Python >= 3.11, a C++17 compiler and make: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint clean

$(VENV)/.installed: pyproject.toml ffi/CMakeLists.txt $(shell find ffi -name '*.cc' -o -name '*.h')
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q scikit-build-core nanobind cmake ninja "jax>=0.10.2,<0.13"
	$(BIN)/pip install -q --no-build-isolation -e ".[test,lint]"
	touch $@

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf build $(VENV)
