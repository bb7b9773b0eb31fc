"""A problem for attend: the history of a few sequences, and the state that a decode loop would have made of it."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.ops import attend as op
from clo_jax.ops import quantized_rows
from clo_jax.ops.offload import offload
from clo_jax.transfer.engine import Engine
from tests.compare import on_cpu

_quantize = on_cpu(jax.jit(quantized_rows.quantize, static_argnames="kv_dtype"))
_dequantize = on_cpu(jax.jit(quantized_rows.dequantize, static_argnames="kv_dtype"))
_reference = on_cpu(jax.jit(op.reference, static_argnames=("sink", "scale")))
POISON = 1e4  # of rows that nobody may read: finite, since the reference multiplies them by 0


def ring(p, sink, T):
    return np.where(p < sink, p, sink + (p - sink) % (T - sink))


@dataclasses.dataclass
class Case:
    """`args` are the operands of attend up to `factors`; `history` [B, K, S, 2, D] holds every token's rows."""

    history: np.ndarray
    args: dict
    slots: list  # [B][Ko] token of each filled slot
    num_slots: int
    sink: int
    scale: float
    kv_dtype: str

    def stored(self, rows):
        """[..., 2, D]: what these rows are once the engine has them."""
        if self.kv_dtype == "auto":
            return rows
        stored = _quantize(jnp.asarray(rows), kv_dtype=self.kv_dtype)
        return np.asarray(_dequantize(stored, kv_dtype=self.kv_dtype))

    @property
    def selected_rows(self):
        """[B, Ko, C, 2, D] and counts [B, Ko]: what the engine's buffer holds."""
        B, Ko = self.args["tail"].shape[:2]
        history = self.stored(self.history[:, :Ko])
        rows = np.full((B, Ko, self.num_slots, *history.shape[3:]), POISON, history.dtype)
        counts = np.zeros((B, Ko), np.int32)
        for b in range(B):
            for h in range(Ko):
                counts[b, h] = len(self.slots[b][h])
                rows[b, h, : counts[b, h]] = history[b, h, self.slots[b][h]]
        return jnp.asarray(rows), jnp.asarray(counts)

    def reference(self):
        """The reference computes in float32, so one compiled program serves every dtype."""
        dtype = self.args["query"].dtype
        factors = self.args["factors"]  # float16 whatever the activations are
        args = [
            np.asarray(x, np.float32) if x.dtype == dtype and x is not factors else x
            for x in (*self.args.values(), *self.selected_rows)
        ]
        out, lse, resident, tail, *codes = _reference(*args, sink=self.sink, scale=self.scale)
        return out.astype(dtype), lse, resident.astype(dtype), tail.astype(dtype), *codes

    def definition(self):
        """out and lse in float64 NumPy, from the sets of tokens that the heads attend to by definition."""
        query = np.asarray(self.args["query"], np.float64)
        B, H, D = query.shape
        K, Ko = self.history.shape[1], self.args["tail"].shape[1]
        stored = self.stored(self.history[:, :Ko]).astype(np.float64)
        out, lse = np.empty((B, H, D)), np.empty((B, H))
        for b in range(B):
            position, flushed = int(self.args["position"][b]), int(self.args["flushed"][b])
            for h in range(H):
                head = h // (H // K)
                tokens = list(range(position + 1))
                if head < Ko:
                    tokens = [*tokens[: self.sink], *range(max(self.sink, flushed), position + 1)]
                rows = self.history[b, head, tokens].astype(np.float64)
                if head < Ko:
                    rows = np.concatenate([stored[b, head, self.slots[b][head]], rows])
                scores = rows[:, 0] @ query[b, h] * self.scale
                weights = np.exp(scores - scores.max())
                out[b, h] = weights @ rows[:, 1] / weights.sum()
                lse[b, h] = np.log(weights.sum()) + scores.max()
        return jnp.asarray(out.astype(self.args["query"].dtype)), jnp.asarray(lse, jnp.float32)

    def attend(self, engine, token=None, **changes):
        """The op's results but the token."""
        token = jnp.zeros((1,), jnp.uint32) if token is None else token
        args = {**self.args, **changes}
        handle = 0 if engine is None else engine.handle
        *results, after = op.attend(
            *args.values(), jnp.zeros((1,), jnp.int32), token, engine=handle, sink=self.sink, scale=self.scale
        )
        assert after.dtype == jnp.uint32 and after.shape == (1,)
        return results


def make(
    seed=0,
    *,
    B=2,
    Ko=2,
    Kr=1,
    G=3,
    D=64,
    S=80,
    T=20,
    C=32,
    R=0,
    sink=4,
    dtype=jnp.float32,
    position=60,
    flushed=48,
    counts=20,
    sharpness=1.0,
    kv_dtype="auto",
):
    """`position`, `flushed` (one for all or one per sequence) and `counts` (one, or [B, Ko]; never more than the
    candidates [sink, flushed)) as in attend. Rows that hold no attended token are poisoned."""
    r = np.random.default_rng(seed)
    K = Ko + Kr
    position = np.broadcast_to(np.asarray(position, np.int32), (B,))
    flushed = np.broadcast_to(np.asarray(flushed, np.int32), (B,))
    counts = np.broadcast_to(np.asarray(counts), (B, Ko))
    history = r.normal(size=(B, K, S, 2, D)).astype(dtype)
    resident = np.full((B, Kr, S, 2, D), POISON).astype(dtype)
    tail = np.full((B, Ko, T, 2, D), POISON).astype(dtype)
    new = np.empty((B, K, 2, D), dtype)
    slots = []
    for b in range(B):
        p = int(position[b])
        new[b] = history[b, :, p]
        resident[b, :, :p] = history[b, Ko:, :p]
        for token in range(p):
            if token < sink or token >= flushed[b]:
                tail[b, :, ring(token, sink, T)] = history[b, :Ko, token]
        candidates = np.arange(sink, max(sink, flushed[b]))
        slots.append([r.permutation(candidates)[: counts[b, h]] for h in range(Ko)])
    args = dict(
        query=jnp.asarray(sharpness * r.normal(size=(B, K * G, D)), dtype),
        key=jnp.asarray(new[:, :, 0]),
        value=jnp.asarray(new[:, :, 1]),
        weights=jnp.asarray(r.normal(size=(Ko, D, R)), jnp.float32),
        mean=jnp.asarray(0.1 * r.normal(size=(B, Ko, D)), jnp.float32),
        position=jnp.asarray(position),
        flushed=jnp.asarray(flushed),
        resident=jnp.asarray(resident),
        tail=jnp.asarray(tail),
        codes=jnp.zeros((B, Ko, S, R // 32), jnp.uint32),
        factors=jnp.zeros((B, Ko, S), jnp.float16),
    )
    return Case(history, args, slots, C, sink, float(D) ** -0.5, kv_dtype)


@contextlib.contextmanager
def engine_for(case, kv_offload=True, delay_us=0):
    """An engine of one layer that holds the flushed rows of the case, and whose slot table is that of the case. Its
    selected rows are on their way: attend has to wait for them."""
    B, Ko = case.args["tail"].shape[:2]
    if Ko == 0:
        yield None
        return
    S, D = case.history.shape[2], case.history.shape[4]
    shape = (B, S, case.num_slots, D, case.args["query"].dtype)
    with Engine([Ko], *shape, kv_offload=kv_offload, timeout_s=10.0, kv_dtype=case.kv_dtype) as engine:
        nothing = jnp.zeros((B,), jnp.int32)
        layer, token = jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.uint32)
        rows = jnp.asarray(case.history[:, :Ko])
        jax.block_until_ready(
            offload(rows, nothing, case.args["flushed"], layer, token, engine=engine.handle, sink=case.sink)
        )
        counts, tokens = engine.slot_counts(0).copy(), engine.slot_tokens(0).copy()
        for b in range(B):
            for h in range(Ko):
                counts[b, h] = len(case.slots[b][h])
                tokens[b, h, : counts[b, h]] = case.slots[b][h]
        engine.write(0, slot_counts=counts, slot_tokens=tokens)
        if kv_offload:
            # Quantized rows whose bytes are all ones have scales that are not numbers.
            poison = POISON if case.kv_dtype == "auto" else 255
            engine.write(0, selected_rows=np.full(engine.selected_rows(0).shape, poison))
            engine.inject_delay(delay_us, 1)
            slots = np.broadcast_to(np.arange(case.num_slots, dtype=np.int32), (B, Ko, case.num_slots))
            engine.stage(0, counts, tokens, slots)
            engine.post(0)
        yield engine
