"""What a decode step costs on the machine at hand: layer time by batch and context, bandwidth of each transfer backend
and of the device's memory. Takes seconds to a few minutes; the machine should have nothing else to do."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import models
from clo_jax.cache.calibration_parts import Costs
from clo_jax.cache.hardware import layer_weight_bytes
from clo_jax.cache.layout import CacheLayout
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.errors import CloError
from clo_jax.policies.clo import CloPolicy, neutral_scores
from clo_jax.prompts import Request
from clo_jax.session import Session
from clo_jax.transfer import backends
from clo_jax.transfer.engine import Engine

_CHUNK = 8  # decode steps per program
_CHUNKS = 3  # timed together, after one more that compiles
_READING_S = 0.2  # at least, in all
_READ_BYTES = 256 << 20  # more than caches hold


def measure_costs(
    config: ModelConfig, params: Any, clo: CloConfig, *, batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (1024, 4096), backend: str = "auto", repeats: int = 3,
    progress: Callable[[str], None] = lambda what: None,
) -> Costs:  # fmt: skip
    """Measures.

    Args:
      config, params: the model; of its layers as many are used as caches do not hold.
      clo: sparsity, retriever, buffers. Thresholds are set so that every head hits.
      batches, contexts: each pair is timed.
      backend: of the timed runs; every available one's bandwidth is measured.
      repeats: of each timing; the shortest counts.
      progress: called with what was just measured, once for each pair, and once for all bandwidths.

    Raises:
      CloError: timings that no repetition made sense of: the machine is busy.
    """
    times = []
    for batch in batches:
        for context in contexts:
            times.append((batch, context, layer_seconds(config, params, clo, batch, context, backend, repeats)))
            progress(f"batch {batch}, {context} tokens")
    links = {found.name: found.gb_per_s * 1e9 for found in backends.report() if found.gb_per_s is not None}
    rate = memory_bytes_per_s()
    progress("bandwidths")
    return Costs(tuple(times), links, jax.devices()[0].device_kind, rate)


def num_measurements(batches: Sequence[int], contexts: Sequence[int]) -> int:
    """How often `progress` is called."""
    return len(batches) * len(contexts) + 1


def layer_seconds(
    config: ModelConfig, params: Any, clo: CloConfig, batch: int, context: int, backend: str = "auto", repeats: int = 3
) -> float:
    """Seconds of one decode layer with all its heads offloaded and all of them hitting: the difference, by layer, of a
    step through one layer and a step through several, which leaves out embedding, head and dispatch.

    Raises:
      ValueError: a context without room for the timed steps, or a model of one layer.
      CloError: more layers were never slower.
    """
    steps = _CHUNK * (_CHUNKS + 1) + 1
    if context < 2 * steps:
        raise ValueError(f"context: got {context}, wanted at least {2 * steps}")
    if config.num_layers < 2:
        raise ValueError("num_layers: got 1, wanted at least 2 to tell a layer's time from that of the rest")
    weights = layer_weight_bytes(config, params["embed"]["embedding"].dtype.itemsize)
    number = min(config.num_layers, max(3, 1 + -(-_READ_BYTES // weights)))
    some = params | {"layers": {layer: params["layers"][layer] for layer in range(number)}}
    params = models.for_decoding(some, keep=True)  # as an LLM decodes
    for _ in range(repeats):
        few, many = (
            _step_seconds(config, params, clo, batch, context, backend, repeats, steps, layers)
            for layers in (1, number)
        )
        if many > few:
            return (many - few) / (number - 1)
    raise CloError(f"the time of a layer at batch {batch}, {context} tokens drowns in noise: is the machine busy?")


def _step_seconds(
    config: ModelConfig, params: Any, clo: CloConfig, batch: int, context: int, backend: str, repeats: int, steps: int,
    layers: int,
) -> float:  # fmt: skip
    """Seconds of a decode step of so many layers; the best of the repeats."""
    model = dataclasses.replace(config, num_layers=layers)
    weights = params | {"layers": {layer: params["layers"][layer] for layer in range(layers)}}
    hitting = dataclasses.replace(clo, sim_threshold=-1.0, refresh_on_flush=False, resident_heads=())
    dtype = str(params["embed"]["embedding"].dtype)
    layout = CacheLayout.clo(model, hitting, batch, context, dtype)
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, config.vocab_size, context - steps - 1)]
    arenas = dict(
        kv_heads=[config.num_kv_heads] * layers, batch=batch, max_tokens=context, num_slots=layout.num_slots,
        head_dim=config.head_dim, dtype=jnp.dtype(dtype), kv_dtype=layout.kv_dtype, backend=backend,
    )  # fmt: skip
    with contextlib.closing(Engine(**arenas)) as engine:
        policy = CloPolicy(layout, hitting, engine.handle, neutral_scores(layout))
        request = Request([prompt] * batch, [steps] * batch, [], None)
        tables, best = policy.tables(), float("inf")
        for _ in range(repeats):
            times = [time.perf_counter() for _ in Session(model, weights, policy, tables, engine, request, _CHUNK)]
            # The first part is the token of prefill, the second a chunk that may compile.
            best = min(best, (times[-1] - times[1]) / (_CHUNK * _CHUNKS))
    return best


def memory_bytes_per_s(size: int = _READ_BYTES) -> float:
    """How fast the default device reads its memory: a sum over an array of `size` bytes, which no cache holds."""
    array = jnp.ones((size // 4,), jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    times: list[float] = []
    # A GPU that was idle takes a while to reach its clocks.
    while len(times) < 5 or sum(times) < _READING_S:
        start = time.perf_counter()
        total(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return size / min(times)
