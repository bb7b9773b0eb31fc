"""Strict JAX for every test: no implicit dtype or rank promotion. (Warnings are errors: pyproject.toml.)"""

import signal

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A test run that a script starts in the background inherits an ignored SIGINT; the tests of Ctrl-C need Python's
# handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
