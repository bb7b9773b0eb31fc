"""Dense decode attention over a long cache: the product's `attend` with every head resident, as policy "full" calls it,
against `jax.nn.dot_product_attention` on cuDNN in a program of the same form, and against torch's
`scaled_dot_product_attention` in a captured graph, where torch for CUDA is installed."""

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
    """The product's figure against each rival's, of 16-bit rows at B = 1. The rivals' forms need cuDNN and torch."""
    ours = _ours(context, heads, kv_heads, head_dim)
    rivals = {"cuDNN by jax.nn.dot_product_attention": _cudnn(context, heads, kv_heads, head_dim)}
    if (torch := _torch(context, heads, kv_heads, head_dim)) is not None:
        rivals["torch scaled_dot_product_attention"] = torch
    own: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(repeats):
        own.append(ours())
        for name, rival in rivals.items():
            theirs[name].append(rival())
    name, median = f"dense decode attention, {kv_heads} heads, {context} rows", statistics.median(own)
    more = {"repeats": repeats, "min": min(own), "max": max(own),
            "gb_per_s": context * kv_heads * head_dim * 4 / median / 1e3}  # fmt: skip
    return [
        report.Row(name, median, "us", rival, statistics.median(times), "< 1.0", more)
        for rival, times in theirs.items()
    ]


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


def _torch(context: int, heads: int, kv_heads: int, head_dim: int) -> Callable[[], float] | None:
    """None without torch, and with a build of it that has no CUDA."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None

    def normal(heads: int, tokens: int):
        return torch.randn((1, heads, tokens, head_dim), dtype=torch.bfloat16, device="cuda")

    q, k, v = normal(heads, 1), normal(kv_heads, context), normal(kv_heads, context)

    def call() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # what is chosen and allocated at the first calls is not captured
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / CALLS * 1e6

    once()
    return once
