"""Comparison of kernels with references: one tolerance per dtype, and a message that says where they differ most."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# |got - want| <= ABSOLUTE + RELATIVE·|want|, for values of order one. float32: sums in another order. bfloat16: one
# rounding of the result (2^-9 relative) from sums that differ in the last float32 bits, plus rounded weights elsewhere.
# float16: the same with three bits more.
TOLERANCE = {
    jnp.dtype(jnp.float32): (1e-5, 1e-5),
    jnp.dtype(jnp.bfloat16): (1e-2, 1e-2),
    jnp.dtype(jnp.float16): (2e-3, 2e-3),
}


def assert_close(got, want, dtype=None, name="result"):
    """Raises AssertionError unless shapes and dtypes agree and every element is within the tolerance of `dtype` (that
    of `want` when None). Infinities must be equal, NaN never passes. The message shows the worst element."""
    assert got.shape == want.shape, f"{name}: got shape {got.shape}, wanted {want.shape}"
    assert got.dtype == want.dtype, f"{name}: got dtype {got.dtype}, wanted {want.dtype}"
    absolute, relative = TOLERANCE[jnp.dtype(want.dtype if dtype is None else dtype)]
    g, w = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if g.size == 0:
        return
    with np.errstate(invalid="ignore"):
        excess = np.where(g == w, -np.inf, np.abs(g - w) - (absolute + relative * np.abs(w)))
    excess = np.where(np.isnan(excess), np.inf, excess)
    worst = np.unravel_index(np.argmax(excess), g.shape)
    index = tuple(int(i) for i in worst)
    bad = int((excess > 0).sum())
    assert bad == 0, (
        f"{name}: {bad} of {g.size} elements differ; worst at {index}: got {g[worst]:.8g}, wanted {w[worst]:.8g}, "
        f"difference {abs(g[worst] - w[worst]):.3g} (allowed {absolute:.1g} + {relative:.1g} of the wanted value)"
    )


def on_cpu(function):
    """`function` of arrays, run on the CPU wherever JAX runs: what a GPU is compared with is then in full float32, and
    compiles in a fraction of the time. Its arrays come back as NumPy's unless JAX runs on the CPU anyway."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        if jax.default_backend() == "cpu":
            return function(*args, **kwargs)
        cpu = jax.devices("cpu")[0]

        def move(x):
            return jax.device_put(x, cpu) if isinstance(x, jax.Array) else x

        with jax.default_device(cpu):
            results = function(*jax.tree.map(move, args), **jax.tree.map(move, kwargs))
        return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, results)

    return run
