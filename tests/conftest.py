"""Strict JAX for every test: no implicit dtype or rank promotion. (Warnings are errors: pyproject.toml.)

Most of a run is XLA, and tests build the same tiny programs again and again: a cache keeps them, new and empty for
every run, so that no run depends on another. Its keys are the whole programs, the options and the compiler. Each
process has its own, for JAX writes entries in place, and a reader would meet half of one.
"""

import gc
import signal
import tempfile

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if jax.default_backend() == "cpu":
    _programs = tempfile.TemporaryDirectory(prefix="clo-jax-tests-")
    jax.config.update("jax_compilation_cache_dir", _programs.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Tracing makes many objects and few cycles; looking for those after every 700 objects is a tenth of a run.
gc.set_threshold(100_000)

# A test run that a script starts in the background inherits an ignored SIGINT; the tests of Ctrl-C need Python's
# handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def fresh_programs():
    """For tests that look into a compiled program or at its compilation: the compiler's own, nothing from the cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_file():
    """A process that keeps every program of a run takes gigabytes; another file gets what it shares from the cache."""
    yield
    jax.clear_caches()
