"""Named shapes and dtypes, shared by the op suites and the benchmarks: measured shapes are tested shapes."""

import jax.numpy as jnp

from clo_jax.config import KV_DTYPES

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8)
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
QUANTIZED = tuple(name for name in KV_DTYPES if name != "auto")
# Lengths around every boundary that a blocked kernel has.
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 200)
