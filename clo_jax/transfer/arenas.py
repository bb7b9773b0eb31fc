"""What the transfer engine has in its arenas, as arrays: for probes, for tests, and for those who look into a run."""

import numpy as np

from clo_jax import _host
from clo_jax.errors import TransferError


class Arenas:
    """The arrays of an engine's layers."""

    _native: _host.Engine | None  # None once it is closed
    _rows_dtype: np.dtype  # of host rows and selected rows

    def _live(self) -> _host.Engine:
        if self._native is None:
            raise TransferError("the engine is closed")
        return self._native

    def write(self, layer: int, **arrays: np.ndarray) -> None:
        """Overwrites whole arrays of a layer, wherever they are; for probes and tests. No program may be running.

        Args:
          layer: index of the layer.
          arrays: host_rows, selected_rows, slot_tokens, slot_last, slot_counts or refreshes, of the shapes that the
            methods of these names give; values are converted to their dtypes.

        Raises:
          ValueError: an array of another shape, or that the layer does not have.
        """
        present = self._arrays(layer, *arrays)
        for name, array in arrays.items():
            target = present.get(name)
            if target is None or np.shape(array) != target.shape:
                wanted = "an array of the layer" if target is None else f"shape {target.shape}"
                raise ValueError(f"{name}: got shape {np.shape(array)}, wanted {wanted}")
            dtype = self._rows_dtype if name.endswith("_rows") else target.dtype
            self._live().write_array(layer, name, np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8))

    def _arrays(self, layer: int, *names: str) -> dict[str, np.ndarray]:
        """Those of these names, or all. What is in device memory is copied, so only ask for what is needed."""
        arrays = self._live().layer_arrays(layer, names)
        always = [array for name, array in arrays.items() if name != "selected_rows"]
        if always and all(array is None for array in always):
            raise ValueError(f"layer: got {layer}, which has no offloaded KV heads")
        return arrays

    def host_rows(self, layer: int) -> np.ndarray:
        """[B, Ko, S, 2, D] in the engine's dtype, or [B, Ko, S, 2·D + 16] uint8 when rows are quantized; not a copy:
        rows that prefill and flushes have written."""
        return self._arrays(layer, "host_rows")["host_rows"].view(self._rows_dtype)

    # The arrays below are in device memory for the backends of a GPU: there they are copies.

    def selected_rows(self, layer: int) -> np.ndarray:
        """[B, Ko, C, 2, D] in the engine's dtype, or [B, Ko, C, 2·D + 16] uint8 when rows are quantized; not a copy:
        rows that transfers have written."""
        rows = self._arrays(layer, "selected_rows", "slot_counts")["selected_rows"]
        if rows is None:
            raise ValueError("selected_rows: there are none without kv_offload")
        return rows.view(self._rows_dtype)

    def slot_tokens(self, layer: int) -> np.ndarray:
        """[B, Ko, C] int32, not a copy: token in each slot, -1 when empty."""
        return self._arrays(layer, "slot_tokens")["slot_tokens"]

    def slot_last(self, layer: int) -> np.ndarray:
        """[B, Ko, C] uint16, not a copy: number of the refresh that last selected the slot's token, modulo 2^16."""
        return self._arrays(layer, "slot_last")["slot_last"]

    def slot_counts(self, layer: int) -> np.ndarray:
        """[B, Ko] int32, not a copy: filled slots, always a prefix."""
        return self._arrays(layer, "slot_counts")["slot_counts"]

    def refreshes(self, layer: int) -> np.ndarray:
        """[B, Ko] uint16, not a copy: refreshes of each head, modulo 2^16."""
        return self._arrays(layer, "refreshes")["refreshes"]

    def request(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies of the layer's last request: counts [B, Ko], tokens [B, Ko, C], slots [B, Ko, C], all int32."""
        names = tuple(f"request_{name}" for name in ("counts", "tokens", "slots"))
        arrays = self._arrays(layer, *names)
        return tuple(arrays[name].copy() for name in names)
