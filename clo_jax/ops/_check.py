"""Argument checks shared by the ops: every error names the argument, what came and what was wanted."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

ACTIVATION_DTYPES = (jnp.float32.dtype, jnp.bfloat16.dtype, jnp.float16.dtype)


def shape(name: str, array: jax.Array, want: Sequence[int | None], letters: str) -> None:
    """Raises ValueError unless `array` has shape `want` (None matches any size); `letters` names the axes."""
    if array.ndim != len(want) or any(w is not None and w != n for n, w in zip(array.shape, want, strict=True)):
        wanted = ", ".join("any" if w is None else str(w) for w in want)
        raise ValueError(f"{name}: got shape {tuple(array.shape)}, wanted {letters} = [{wanted}]")


def dtype(name: str, array: jax.Array, *wanted) -> None:
    """Raises ValueError unless the array's dtype is one of `wanted`."""
    if array.dtype not in [jnp.dtype(w) for w in wanted]:
        raise ValueError(f"{name}: got dtype {array.dtype}, wanted {' or '.join(str(jnp.dtype(w)) for w in wanted)}")


def multiple(name: str, value: int, base_name: str, base: int) -> None:
    """Raises ValueError unless `value` is a positive multiple of `base`."""
    if base <= 0 or value <= 0 or value % base:
        raise ValueError(f"{name}: got {value}, wanted a positive multiple of {base_name} = {base}")
