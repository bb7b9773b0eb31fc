"""Logits along given tokens (teacher forcing): what a policy makes of a text, token by token, whatever it would have
said itself."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.config import ModelConfig
from clo_jax.decode_step import DecodeState, decode_step
from clo_jax.interrupt import deferred_interrupt
from clo_jax.policies.attended import Attended, attended, observed
from clo_jax.policies.base import Policy, Tables
from clo_jax.policies.host_rows import HostRows
from clo_jax.prompts import Request
from clo_jax.session import CompileClock, Session
from clo_jax.transfer.engine import Engine, transfer_errors


def forced_chunk(
    config: ModelConfig, policy: Policy, params, tables: tuple[Tables, ...], state: DecodeState, tokens: jax.Array,
    valid: jax.Array,
) -> tuple[jax.Array, DecodeState]:  # fmt: skip
    """One decode step for each of the given tokens.

    Args:
      tokens: [B, n] int32. valid: [B] int32: how many of them count; the others change nothing.

    Returns:
      logits [B, n, V] float32 after each token; the state.
    """

    def step(i, carry):
        out, state = carry
        token = jax.lax.dynamic_index_in_dim(tokens, i, axis=1, keepdims=False)
        logits, state = decode_step(config, policy, params, tables, state._replace(token=token, done=i >= valid))
        return jax.lax.dynamic_update_slice_in_dim(out, logits[:, None], i, axis=1), state

    out = jnp.zeros((*tokens.shape, config.vocab_size), jnp.float32)
    return jax.lax.fori_loop(0, tokens.shape[1], step, (out, state))


forced_chunk_jitted = jax.jit(forced_chunk, static_argnums=(0, 1), donate_argnums=4)


class ForcedSession(Session):
    """Runs one text: prefills the first `prefix` tokens, then decodes the others as given.

    Iterating yields logits float32 [n, V] for each token after the prefix, of what is predicted in its place: first of
    one token, from prefill, then chunk by chunk. The last token is not decoded. `on_state` sees the state after each
    chunk, before its logits come; the next chunk takes it apart.
    """

    def __init__(
        self, model: ModelConfig, params: Any, policy: Policy, tables: Any, engine: Engine | HostRows | None,
        tokens: Sequence[int], prefix: int, chunk_tokens: int,
        on_state: Callable[[DecodeState], Any] = lambda state: None,
    ) -> None:  # fmt: skip
        request = Request([tokens[:prefix]], [len(tokens) - prefix], (), None)
        super().__init__(model, params, policy, tables, engine, request, chunk_tokens)
        self._given, self._on_state = list(tokens[prefix:]), on_state

    def _run(self) -> Iterator[np.ndarray]:
        compiling, start = CompileClock(), time.perf_counter()
        with deferred_interrupt() as raise_pending, transfer_errors():
            layers, shared, logits, lengths = self._prefill(raise_pending)
            token, count, done = jnp.zeros_like(lengths), jnp.zeros_like(lengths), jnp.zeros_like(lengths, bool)
            state = DecodeState(layers, shared, lengths, token, count, done)
            del layers, shared
            jax.block_until_ready(state)
        self._prefilled(start, compiling)
        self.tokens[0].append(self._given[0])
        yield np.asarray(logits)
        compiling, start = CompileClock(), time.perf_counter()
        paused = 0.0
        for first in range(0, len(self._given) - 1, self._chunk):
            given = self._given[first : min(first + self._chunk, len(self._given) - 1)]
            tokens = np.zeros((1, self._chunk), np.int32)
            tokens[0, : len(given)] = given
            with deferred_interrupt(), transfer_errors(), self._in_line():
                logits, state = forced_chunk_jitted(
                    self._model, self._policy, self._params, self._tables, state, jnp.asarray(tokens),
                    jnp.full((1,), len(given), jnp.int32),
                )  # fmt: skip
                jax.block_until_ready((logits, state))
            now = time.perf_counter()
            self._times["decode"] = now - start - paused - compiling.seconds()
            self._times["decode_compile"] = compiling.seconds()
            self.tokens[0].extend(self._given[first + 1 : first + 1 + len(given)])
            self._on_state(state)
            found = np.asarray(logits[0, : len(given)])
            del logits  # the next chunk's take their place
            yield found
            paused += time.perf_counter() - now  # the consumer's time is not ours

    def _in_line(self) -> contextlib.AbstractContextManager:
        """Rows arrive in line. Beside a transfer kernel that waits for the program, nothing else may be asked of a GPU:
        the tokens' copy would stand behind that kernel. And along a given text time does not matter."""
        return contextlib.nullcontext() if self._engine is None else self._engine.serving(0, None)


def forced_attention(
    model: ModelConfig, params: Any, policy: Policy, tables: Any, engine: Engine | HostRows | None,
    tokens: Sequence[int], prefix: int,
) -> Iterator[tuple[Attended, ...]]:  # fmt: skip
    """What each decode step along one text attends to, by layer; one step a program, so that the host can look.

    Raises:
      ValueError: InfiniGen with a limited pool.
    """
    policy, found = observed(policy), []

    def look(state: DecodeState) -> None:
        found.append(attended(policy, engine, state.layers, prefix, int(state.position[0]) - 1))

    for _ in ForcedSession(model, params, policy, tables, engine, tokens, prefix, 1, look):
        while found:  # nothing yet after prefill
            yield found.pop()
