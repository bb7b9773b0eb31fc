"""Strict JAX for every test: no implicit dtype or rank promotion. (Warnings are errors: pyproject.toml.)"""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
