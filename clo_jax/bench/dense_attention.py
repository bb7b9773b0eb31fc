"""Dense decode attention over a long cache: the product's `attend` with every head resident, as policy "full" calls it,
against `jax.nn.dot_product_attention` on cuDNN, in programs of the same form."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from clo_jax.bench import report
from clo_jax.cache.layout import CacheLayout
from clo_jax.config import ModelConfig, RopeConfig
from clo_jax.policies.base import Position
from clo_jax.policies.full import FullPolicy

CALLS = 64  # in one program
UNROLLED = 8  # of them in one round of its loop, so that they are launched as one graph


def rows(context: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128, repeats: int = 5) -> list[report.Row]:
    """Two figures, of 16-bit rows at B = 1; the control's form needs cuDNN."""
    ours = _ours(context, heads, kv_heads, head_dim)
    theirs = _cudnn(context, heads, kv_heads, head_dim)
    times: dict[str, list[float]] = {"ours": [], "cudnn": []}
    for _ in range(repeats):
        times["ours"].append(ours())
        times["cudnn"].append(theirs())
    own, control = (statistics.median(times[name]) for name in ("ours", "cudnn"))
    name = f"dense decode attention, {kv_heads} heads, {context} rows"
    more = {"repeats": repeats, "min": min(times["ours"]), "max": max(times["ours"]),
            "gb_per_s": context * kv_heads * head_dim * 4 / own / 1e3}  # fmt: skip
    return [report.Row(name, own, "us", "cuDNN by jax.nn.dot_product_attention", control, "< 1.0", more)]


def _timed(program, *operands) -> Callable[[], float]:
    """A function that gives the microseconds of one of the program's calls; the program returns its last operand,
    which it may take over."""
    *constants, state = operands
    state = jax.block_until_ready(program(*constants, state))

    def once() -> float:
        nonlocal state
        start = time.perf_counter()
        state = jax.block_until_ready(program(*constants, state))
        return (time.perf_counter() - start) / CALLS * 1e6

    return once


def _ours(context: int, heads: int, kv_heads: int, head_dim: int) -> Callable[[], float]:
    model = ModelConfig(
        "llama", 256, heads * head_dim, 256, 1, heads, kv_heads, head_dim, 1e-5, context, RopeConfig(1e4)
    )
    policy = FullPolicy(CacheLayout.full(model, 1, context, "bfloat16"))
    at = Position(jnp.full((1,), context - 1, jnp.int32), jnp.ones((1,), bool))
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (1, heads, head_dim), jnp.bfloat16)
    state = {"resident": jax.random.normal(keys[1], (1, kv_heads, context, 2, head_dim), jnp.bfloat16)}

    def program(at, carry):
        def body(_, carry):
            q, state, shared = carry
            new = q[:, :: heads // kv_heads]
            return policy.attend(0, {}, q, new, new, at, state, shared)

        return jax.lax.fori_loop(0, CALLS, body, carry, unroll=UNROLLED)

    return _timed(jax.jit(program, donate_argnums=1), at, (q, state, policy.allocate()))


def _cudnn(context: int, heads: int, kv_heads: int, head_dim: int) -> Callable[[], float]:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, 1, heads, head_dim), jnp.bfloat16)
    k, v = (jax.random.normal(key, (1, context, kv_heads, head_dim), jnp.bfloat16) for key in keys[1:])

    def program(k, v, q):
        def body(_, q):
            return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

        return jax.lax.fori_loop(0, CALLS, body, q, unroll=UNROLLED)

    return _timed(jax.jit(program, donate_argnums=2), k, v, q)
