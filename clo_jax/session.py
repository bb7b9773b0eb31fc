"""One batch of prompts from prefill to the last token: the mutable part of a generation, outside every jitted function.

A session borrows the engine; whatever ends it (the last token, Ctrl-C, an exception in a callback, a closed stream),
the engine is reset and serves the next session.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.cache.layout import CacheLayout
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.generate import (
    JITTED,
    DecodeState,
    Limits,
    begin_jitted,
    bucket_length,
    decode_chunk_jitted,
    prefill,
)  # fmt: skip
from clo_jax.interrupt import deferred_interrupt
from clo_jax.policies.base import LayerState, Policy, Shared
from clo_jax.policies.clo import CloPolicy
from clo_jax.policies.full import FullPolicy
from clo_jax.policies.host_rows import HostRows
from clo_jax.policies.tracking import HeadStatistics, collect
from clo_jax.prompts import Request
from clo_jax.results import Metrics
from clo_jax.rivals import RivalConfig
from clo_jax.transfer.engine import Engine, transfer_errors

STOP_SLOTS = 8  # stop ids are padded to a multiple of this, so that their number compiles nothing


class CompileClock:
    """Seconds in which something was compiled since it was made, as JAX reports it. What is part of another compilation
    counts once."""

    _intervals: list[tuple[float, float]] = []  # (start, end) of `perf_counter`, disjoint, in order
    _lock = threading.Lock()
    _registered = False

    def __init__(self) -> None:
        with CompileClock._lock:
            if not CompileClock._registered:
                jax.monitoring.register_event_duration_secs_listener(CompileClock._listen)
                CompileClock._registered = True
        self._start = time.perf_counter()

    @staticmethod
    def _listen(event: str, seconds: float, **_: Any) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        end = time.perf_counter()
        start = end - seconds
        with CompileClock._lock:
            intervals = CompileClock._intervals
            while intervals and intervals[-1][0] >= start:
                intervals.pop()
            if intervals and intervals[-1][1] > start:
                start = intervals[-1][1]
            intervals.append((start, end))

    def seconds(self) -> float:
        total = 0.0
        with CompileClock._lock:
            for start, end in reversed(CompileClock._intervals):
                if end <= self._start:
                    break
                total += end - max(start, self._start)
        return total


class Session:
    """Runs one request. Iterating yields, chunk by chunk, the new token ids of every row."""

    def __init__(
        self, model: ModelConfig, params: Any, policy: Policy, tables: Any, engine: Engine | HostRows | None,
        request: Request, chunk_tokens: int, on_layer=lambda layer: None,
    ) -> None:  # fmt: skip
        self._model, self._params, self._policy, self._tables = model, params, policy, tables
        self._engine, self._request, self._chunk, self._on_layer = engine, request, chunk_tokens, on_layer
        self._layout: CacheLayout = policy.layout
        self._stop = set(request.stop)
        self.tokens: list[list[int]] = [[] for _ in request.prompts]
        self._times: dict[str, float] = {}
        self._after_prefill = None
        self.head_statistics: HeadStatistics | None = None  # of a policy that tracks its heads, after each chunk

    def __iter__(self) -> Iterator[list[list[int]]]:
        if self._engine is not None:
            self._engine.reset()
            self._engine.clear_counters()
        try:
            yield from self._run()
        finally:
            if self._engine is not None:
                self._engine.reset()

    def _run(self) -> Iterator[list[list[int]]]:
        request, compiling, start = self._request, CompileClock(), time.perf_counter()
        stop = sorted(self._stop)
        slots = STOP_SLOTS * max(1, -(-len(stop) // STOP_SLOTS))
        padded = stop + [-1] * (slots - len(stop))
        limits = Limits(jnp.asarray(request.max_new_tokens, jnp.int32), jnp.asarray(padded, jnp.int32))
        with deferred_interrupt() as raise_pending, transfer_errors():
            layers, shared, logits, lengths = self._prefill(raise_pending)
            state = begin_jitted(layers, shared, logits, lengths, request.sampling, limits)
            del layers, shared
            first, done = np.asarray(state.token), np.asarray(state.done)
        self._prefilled(start, compiling)
        yield self._take([[int(t)] for t in first])
        compiling, start = CompileClock(), time.perf_counter()
        paused = 0.0
        stops_early = jax.default_backend() == "cpu"  # a GPU would wait for the host after each step
        while not done.all():
            with deferred_interrupt(), transfer_errors():
                with self._serving(state, limits.stop.shape, request.sampling is not None):
                    out, state = decode_chunk_jitted(
                        self._model, self._policy, self._chunk, stops_early, self._params, self._tables, state,
                        request.sampling, limits,
                    )  # fmt: skip
                    jax.block_until_ready((out, state))
                out, done = np.asarray(out), np.asarray(state.done)
                if isinstance(self._policy, CloPolicy) and self._policy.track:
                    self.head_statistics = collect(state.layers, self._model.num_kv_heads)
            now = time.perf_counter()
            self._times["decode"] = now - start - paused - compiling.seconds()
            self._times["decode_compile"] = compiling.seconds()
            yield self._take([[int(t) for t in row if t >= 0] for row in out])
            paused += time.perf_counter() - now  # the consumer's time is not ours

    def _prefill(
        self, raise_pending: Callable[[], None]
    ) -> tuple[tuple[LayerState, ...], Shared, jax.Array, jax.Array]:
        """Layers, shared state, logits and lengths [B] after the prompts; interrupts are let through between layers."""
        prompts = self._request.prompts
        lengths = np.array([len(p) for p in prompts], np.int32)
        tokens = np.zeros((len(lengths), bucket_length(int(lengths.max()), self._layout.max_tokens)), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt

        def after_layer(index, arrays):
            jax.block_until_ready(arrays)  # nothing runs when an interrupt is let through
            self._on_layer(index)
            raise_pending()

        lengths = jnp.asarray(lengths)
        layers, shared, logits = prefill(
            self._model, self._policy, self._params, self._tables, jnp.asarray(tokens), lengths, JITTED, after_layer
        )
        return layers, shared, logits, lengths

    def _prefilled(self, start: float, compiling: CompileClock) -> None:
        """Notes what prefill took, and what the engine had moved by then."""
        self._times["ttft"] = time.perf_counter() - start - compiling.seconds()
        self._times["compile"] = compiling.seconds()
        if self._engine is not None:
            self._engine.drain()  # rows of the first fill are prefill's, also those still under way
            self._after_prefill = self._engine.counters()

    def _serving(self, state: DecodeState, *static: Any) -> contextlib.AbstractContextManager:
        """What goes around one run of a decode program, so that its rows arrive beside it. `static`: what the program
        was compiled for beside policy, chunk and batch."""
        if self._engine is None:
            return contextlib.nullcontext()
        layers = sum(bool(self._layout.offloaded(layer)) for layer in range(self._layout.num_layers))
        leaves, nesting = jax.tree.flatten(self._params)
        # Packed parameters are another program than plain ones.
        arrays = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        program = (self._model, self._policy, self._chunk, state.token.shape, nesting, arrays, *static)
        return self._engine.serving(self._chunk * layers, program) if layers else contextlib.nullcontext()

    def _take(self, new: list[list[int]]) -> list[list[int]]:
        for row, ids in zip(self.tokens, new, strict=True):
            row.extend(ids)
        return new

    def finish_reason(self, row: int) -> str | None:
        """Why a row ended, or None while it goes on."""
        ids = self.tokens[row]
        if ids and ids[-1] in self._stop:
            return "stop"
        return "length" if len(ids) >= self._request.max_new_tokens[row] else None

    def without_stop(self, tokens: list[int]) -> list[int]:
        """Tokens less the stop token that ended them."""
        return tokens[:-1] if tokens and tokens[-1] in self._stop else tokens

    def metrics(self) -> Metrics:
        """Costs so far."""
        steps = max(len(ids) for ids in self.tokens) - 1
        parts = self._layout.device_bytes()
        base = Metrics(
            attention=self._policy.name,
            ttft_s=self._times.get("ttft", 0.0),
            tpot_s=self._times["decode"] / steps if steps > 0 and "decode" in self._times else None,
            compile_s=self._times.get("compile", 0.0) + self._times.get("decode_compile", 0.0),
            device_kv_bytes=sum(parts.values()),
            host_kv_bytes=self._layout.host_bytes(),
            device_kv_parts=parts,
        )
        if isinstance(self._policy, FullPolicy) or (isinstance(self._policy, CloPolicy) and self._engine is None):
            return base
        config: CloConfig | RivalConfig = self._policy.config
        base = dataclasses.replace(base, retriever=self._policy.retriever_name, sparsity=config.sparsity)
        if isinstance(self._policy, CloPolicy):
            base = dataclasses.replace(
                base,
                head_scores=self._policy.scores.source,
                planner=self._policy.planner,
                plan_revision=None if self._policy.revision is None else self._policy.revision.to_dict(),
                resident_heads=sum(len(heads) for heads in self._layout.resident),
                refresh=config.refresh,
                retain=config.retain,
                guess_from=config.guess_from,
                kv_dtype=config.kv_dtype,
            )
        return base if self._engine is None else dataclasses.replace(base, **self._moved())

    def _moved(self) -> dict[str, Any]:
        """What moved since the first token, and by whom."""
        now, fill = self._engine.counters(), self._after_prefill
        hits, misses = now.hits - fill.hits, now.misses - fill.misses
        return {
            "backend": self._engine.backend,
            "hit_rate": hits / (hits + misses) if hits + misses else None,
            "rows_moved": now.rows_moved - fill.rows_moved,
            "bytes_moved": now.bytes_moved - fill.bytes_moved,
            "rows_selected": now.rows_selected - fill.rows_selected,
            "rows_offloaded": now.rows_offloaded,
            "first_fill_rows": fill.rows_posted,
            "requests": now.requests - fill.requests,
            "wait_s": (now.wait_ns - fill.wait_ns) / 1e9,
        }
