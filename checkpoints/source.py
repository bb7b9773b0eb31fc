"""What a conversion reads from: names, shapes and values of tensors under their Hugging Face names, and the texts
beside them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from clo_jax.config import Dtype


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor as the source declares it. `dtype`: float32, float16, bfloat16 or the name of a GGUF quantization.
    `stored_name`: its name in the file, for messages."""

    shape: tuple[int, ...]
    dtype: str
    stored_name: str
    file: Path


class Source(Protocol):
    """A model to convert.

    `tensors` is keyed by Hugging Face name, [out, in] kernels, rotary halves split (not interleaved). `read` returns
    one tensor in float32, float16 or bfloat16. `config` and `generation_config` are in Hugging Face form. `texts` are
    the files to write beside the parameters, by name. `notes` say what was assumed. `rotary_pairs_adjacent`: whether
    rotary pairs of Q and K are neighbours in the file, which `read(name, as_stored=True)` leaves as it is.
    """

    kind: str
    path: Path
    files: tuple[Path, ...]
    index_file: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    tensors: Mapping[str, TensorInfo]
    notes: tuple[str, ...]
    rotary_pairs_adjacent: bool

    def read(self, name: str, as_stored: bool = False) -> np.ndarray: ...

    def texts(self, tokenizer: Path | None, with_tokenizer: bool) -> dict[str, bytes]: ...


def lossless_dtype(source: Source) -> Dtype:
    """The narrower of float32 and bfloat16 that holds every tensor of the source exactly (quantized: dequantized to
    float32). Not float16: activations overflow it where weights do not, so it is taken by name only."""
    return "bfloat16" if {info.dtype for info in source.tensors.values()} == {"bfloat16"} else "float32"
