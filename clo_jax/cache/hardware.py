"""What a plan needs to know of a machine: how fast its device memory and its link are, and how large the device is."""

import dataclasses
import math
from collections.abc import Mapping

from clo_jax.config import ModelConfig

# What matrix-vector products reach of the nominal memory bandwidth, measured on an H200: 436 MB of weights in 105 us.
_REACHED = 0.87


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates are what is reached, not nominal ones. `layer_overhead_s`: time of a layer beside reading its bytes.
    `source`: where the figures come from."""

    name: str
    device_bytes: int
    device_bytes_per_s: float
    link_bytes_per_s: float
    layer_overhead_s: float = 10e-6
    source: str = "given"

    def __post_init__(self) -> None:
        for field in ("device_bytes", "device_bytes_per_s", "link_bytes_per_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field}: got {value}, wanted a positive number")
        if not (math.isfinite(self.layer_overhead_s) and self.layer_overhead_s >= 0):
            raise ValueError(f"layer_overhead_s: got {self.layer_overhead_s}, wanted a number >= 0")


PRESETS: Mapping[str, Hardware] = {
    "pcie4": Hardware("A40, PCIe 4", 48 * 10**9, 696e9 * _REACHED, 21.21e9, source="link measured by the paper"),
    "pcie5": Hardware("H200, PCIe 5", 139 << 30, 4.8e12 * _REACHED, 51e9, source="measured"),
    "pcie6": Hardware("B300, PCIe 6", 288 * 10**9, 8e12 * _REACHED, 102e9, source="estimated: twice PCIe 5"),
    "c2c": Hardware("GH200, NVLink-C2C", 144 * 10**9, 4.9e12 * _REACHED, 400e9, source="estimated: 0.9 of nominal"),
}


def layer_weight_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of one layer's matrices: what a decode step reads of them."""
    wide, narrow = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    projections = model.hidden_size * (2 * wide + 2 * narrow)
    return itemsize * (projections + 3 * model.hidden_size * model.intermediate_size)


def model_weight_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of all matrices: layers, embeddings and head."""
    tables = 1 if model.tie_word_embeddings else 2
    return model.num_layers * layer_weight_bytes(model, itemsize) + (
        itemsize * tables * model.vocab_size * model.hidden_size
    )
