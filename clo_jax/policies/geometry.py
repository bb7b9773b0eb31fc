"""Geometry of a rival policy's cache: that of full attention, and where its own bytes are."""

import dataclasses

from clo_jax.cache.layout import CacheLayout
from clo_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class RivalLayout:
    """What the rest of the program asks of a layout. `full`: everything resident; `full_layers`: the first layers,
    which are kept and attended to like that; `parts`: device bytes of the others by name; `host`: host bytes of their
    rows."""

    full: CacheLayout
    full_layers: int
    parts: tuple[tuple[str, int], ...]
    host: int

    @classmethod
    def of(cls, model: ModelConfig, batch: int, max_tokens: int, dtype: str, full_layers: int = 0) -> "RivalLayout":
        """A layout that has no bytes of its own yet.

        Raises:
          ValueError: more full layers than the model has.
        """
        if not 0 <= full_layers <= model.num_layers:
            raise ValueError(f"full_layers: got {full_layers}, wanted 0 to {model.num_layers}, the model's layers")
        return cls(CacheLayout.full(model, batch, max_tokens, dtype), full_layers, (), 0)

    @property
    def batch(self) -> int:
        return self.full.batch

    @property
    def max_tokens(self) -> int:
        return self.full.max_tokens

    @property
    def num_layers(self) -> int:
        return self.full.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self.full.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.full.head_dim

    @property
    def dtype(self) -> str:
        return self.full.dtype

    @property
    def itemsize(self) -> int:
        return self.full.itemsize

    @property
    def row_bytes(self) -> int:
        return self.full.row_bytes

    @property
    def own_heads(self) -> int:
        """KV heads, of all sequences and layers, that are the policy's own."""
        return self.batch * self.num_kv_heads * (self.num_layers - self.full_layers)

    def with_bytes(self, parts: dict[str, int], host: int, in_turn: dict[str, int] | None = None) -> "RivalLayout":
        """The same with the bytes per own head that `parts` and `host` give, and those of the buffers `in_turn`, which
        all layers use one after the other, so that they are there once, for the heads of one layer."""
        own_layers = self.num_layers - self.full_layers
        of_one = self.own_heads // own_layers if own_layers else 0
        found = [(name, n * self.own_heads) for name, n in parts.items()]
        found += [(name, n * of_one) for name, n in (in_turn or {}).items()]
        return dataclasses.replace(self, parts=tuple(found), host=host * self.own_heads)

    def offloaded(self, layer: int) -> tuple[int, ...]:
        """KV heads of a layer whose rows are in host memory."""
        return tuple(range(self.num_kv_heads)) if self.host and layer >= self.full_layers else ()

    @property
    def resident(self) -> tuple[tuple[int, ...], ...]:
        """KV heads of each layer whose rows are all on the device."""
        every = tuple(range(self.num_kv_heads))
        return tuple(() if self.offloaded(layer) else every for layer in range(self.num_layers))

    def device_bytes(self) -> dict[str, int]:
        """Device bytes by part."""
        kept = self.batch * self.num_kv_heads * self.full_layers * self.max_tokens * self.row_bytes
        return ({"resident rows": kept} if kept else {}) | dict(self.parts)

    def host_bytes(self) -> int:
        """Host bytes of the rows."""
        return self.host
