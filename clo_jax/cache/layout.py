"""Geometry of one run's cache: which KV heads are offloaded, how many rows each buffer holds, what that costs.

Per sequence and offloaded KV head, at context length n, attention reads

    sink + (between `recent` and `recent + flush - 1`) newest tokens + at most ceil(retain · k) selected rows,
    k = min(ceil(sparsity · n), selectable tokens)

A resident KV head reads all n tokens. Every size in the program follows from this one object.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from clo_jax.config import CloConfig, ModelConfig

# Parts of the bytes below that the transfer engine allocates, once for all runs.
ENGINE_PARTS = frozenset({"selected rows", "slot tables", "requests", "host rows"})
SCALE_BYTES = 16  # of a quantized row (`ops.quantized_rows`)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Static geometry; hashable, so that it can be a static argument of a jitted function."""

    batch: int  # B
    max_tokens: int  # S
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    dtype: str
    resident: tuple[tuple[int, ...], ...]  # resident KV heads of each layer, ascending
    hash_bits: int  # R
    sink: int
    recent: int
    flush: int
    sparsity: float
    retain: float
    kv_dtype: str = "auto"

    @classmethod
    def full(cls, model: ModelConfig, batch: int, max_tokens: int, dtype: str) -> "CacheLayout":
        """Everything resident: full attention."""
        every = tuple(range(model.num_kv_heads))
        return cls(
            batch, max_tokens, model.num_heads, model.num_kv_heads, model.head_dim, dtype,
            resident=(every,) * model.num_layers, hash_bits=0, sink=0, recent=1, flush=1, sparsity=1.0, retain=1.0,
        )  # fmt: skip

    @classmethod
    def clo(cls, model: ModelConfig, clo: CloConfig, batch: int, max_tokens: int, dtype: str) -> "CacheLayout":
        """Layout of the CLO policy.

        Raises:
          ValueError: resident heads that the model does not have, or a head dim whose rows cannot be quantized.
        """
        if clo.kv_dtype != "auto" and model.head_dim % 8:
            raise ValueError(
                f"kv_dtype: got {clo.kv_dtype!r} with a head dim of {model.head_dim}, wanted auto: quantized rows want "
                "a multiple of 8"
            )
        plan = dict(clo.resident_heads) if clo.resident_heads is not None else {0: tuple(range(model.num_kv_heads))}
        for layer, heads in plan.items():
            if not 0 <= layer < model.num_layers:
                raise ValueError(f"resident_heads: got layer {layer}, wanted 0 to {model.num_layers - 1}")
            if len(set(heads)) != len(heads) or any(not 0 <= h < model.num_kv_heads for h in heads):
                raise ValueError(
                    f"resident_heads: got heads {list(heads)} in layer {layer}, wanted distinct numbers from 0 to "
                    f"{model.num_kv_heads - 1}"
                )
        return cls(
            batch, max_tokens, model.num_heads, model.num_kv_heads, model.head_dim, dtype,
            resident=tuple(tuple(sorted(plan.get(layer, ()))) for layer in range(model.num_layers)),
            hash_bits=0 if clo.retriever == "exact" else clo.hash_bits,
            sink=clo.sink_tokens, recent=clo.recent_tokens, flush=clo.flush_tokens,
            sparsity=clo.sparsity, retain=clo.retain, kv_dtype=clo.kv_dtype,
        )  # fmt: skip

    # --- sizes ----------------------------------------

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_layers(self) -> int:
        return len(self.resident)

    def offloaded(self, layer: int) -> tuple[int, ...]:
        """Offloaded KV heads of a layer, ascending."""
        return tuple(h for h in range(self.num_kv_heads) if h not in self.resident[layer])

    @property
    def tail_rows(self) -> int:
        """T: sink rows, then a ring for the newest tokens until their block is flushed."""
        return self.sink + self.recent + self.flush

    @property
    def k_max(self) -> int:
        return min(self.max_tokens, math.ceil(self.sparsity * self.max_tokens))

    @property
    def num_slots(self) -> int:
        """C: rows that the selected-rows buffer of a head holds."""
        return min(self.max_tokens, math.ceil(self.retain * self.k_max))

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V of one head, as activations: of resident and tail rows."""
        return 2 * self.head_dim * self.itemsize

    @property
    def stored_row_bytes(self) -> int:
        """The same of host rows, of rows on the link, and of selected rows."""
        return self.row_bytes if self.kv_dtype == "auto" else 2 * self.head_dim + SCALE_BYTES

    # --- functions of the context length (int32 scalars or arrays) ------------------------

    def flushed(self, length):
        """Tokens [0, flushed) are on the host when a sequence has `length` tokens: whole blocks that leave at least
        `recent` tokens in the tail."""
        return jnp.maximum(length - self.recent, 0) // self.flush * self.flush

    def num_selectable(self, length):
        """Tokens that a refresh may select: flushed ones beyond the sink."""
        return jnp.maximum(self.flushed(length) - self.sink, 0)

    def num_selected(self, length):
        """k at a context of `length` tokens."""
        k = jnp.ceil(jnp.float32(self.sparsity) * length.astype(jnp.float32)).astype(jnp.int32)
        return jnp.minimum(jnp.minimum(k, self.k_max), self.num_selectable(length))

    def capacity(self, k):
        """Slots that a head may fill when k rows are selected."""
        slots = jnp.ceil(jnp.float32(self.retain) * k.astype(jnp.float32)).astype(jnp.int32)
        return jnp.clip(slots, k, self.num_slots)

    # --- bytes ----------------------------------------

    def device_bytes(self) -> dict[str, int]:
        """Device bytes by part: what attention reads and what finds it."""
        Ko = sum(len(self.offloaded(layer)) for layer in range(self.num_layers))
        Kr = self.num_layers * self.num_kv_heads - Ko
        B, S, C, D, G = self.batch, self.max_tokens, self.num_slots, self.head_dim, self.group
        parts = {"resident rows": B * Kr * S * self.row_bytes}
        if Ko:
            parts |= {
                "selected rows": B * Ko * C * self.stored_row_bytes,
                "slot tables": B * Ko * (6 * C + 4 + 2),
                "requests": B * Ko * (8 * C + 4),
                "codes": B * Ko * S * (self.hash_bits // 8 + (2 if self.hash_bits else 0)),
                "tail rows": B * Ko * self.tail_rows * self.row_bytes,
                "labels": B * Ko * (G * D * self.itemsize + 4 * D + 4 * G + 4),
            }
        return parts

    def host_bytes(self) -> int:
        """Host bytes of the offloaded rows."""
        Ko = sum(len(self.offloaded(layer)) for layer in range(self.num_layers))
        return self.batch * Ko * self.max_tokens * self.stored_row_bytes

    def head_order(self, layer: int) -> np.ndarray | None:
        """KV heads of a mixed layer in the order that ops want, offloaded first; None when it is the natural one."""
        order = np.array(self.offloaded(layer) + self.resident[layer], np.int32)
        return None if np.array_equal(order, np.arange(self.num_kv_heads)) else order
