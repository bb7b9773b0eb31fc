"""A GGUF file (llama.cpp): tensors dequantized to float32, configuration and tokenizer out of its metadata.

llama.cpp's converter permutes the rows of Llama's Q and K so that rotary pairs are neighbours; here they are put back
into two halves, the order of Hugging Face and of our models. Qwen2's are stored as they are.
"""

import functools
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from clo_jax.checkpoints import gguf_config, gguf_tokenizer
from clo_jax.checkpoints.files import json_bytes, read_bytes
from clo_jax.checkpoints.source import TensorInfo
from clo_jax.errors import CheckpointError

_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{ours}": f"self_attn.{ours[0]}_proj" for ours in ("q", "k", "v", "output")},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_DIVISORS = "rope_freqs.weight"
_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_PERMUTED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")


def _hf_name(name: str) -> str:
    """Hugging Face name of a tensor; unknown ones keep theirs and are reported as unexpected later."""
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found and found[2] in _LAYER:
        return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"
    return _MODEL.get(name, name)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads · D, ...] with rotary pairs as neighbours -> the same with the pairs in two halves of each head."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class GgufFile:
    """A `Source` (see source.py) over one file.

    Raises:
      CheckpointError: not a GGUF file or cut off, a split or big-endian one, an architecture other than llama and
        qwen2, a quantization that the library cannot undo.
    """

    kind = "gguf"

    def __init__(self, file: Path):
        self.path, self.index_file, self.files = file, file, (file,)
        reader = _open(file)
        self.metadata: dict[str, Any] = {}
        for key, field in reader.fields.items():
            self.metadata[key] = _contents(file, key, field)
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(f"{file}: one of {self.metadata['split.count']} parts; merge them first (gguf-split)")
        self._stored = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        self._check(file.stat().st_size)
        divisors = self._raw(_DIVISORS) if _DIVISORS in self._stored else None
        self.tensors = {
            name: TensorInfo(
                tuple(int(size) for size in reversed(tensor.shape)), self._dtype(tensor), str(tensor.name), file
            )
            for name, tensor in self._stored.items()
            if name != _DIVISORS
        }
        try:
            shapes = {name: info.shape for name, info in self.tensors.items()}
            self.config, self.notes = gguf_config.hf_config(self.metadata, shapes, divisors)
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from None
        self.generation_config = gguf_config.generation_config(self.metadata)

    def _check(self, size: int) -> None:
        problems = []
        for tensor in self._stored.values():
            if int(tensor.data_offset) + int(tensor.n_bytes) > size:
                problems.append(f"{tensor.name} ends beyond the end of the file: it is cut off")
            elif not _dequantizable(tensor.tensor_type):
                problems.append(f"{tensor.name} is {tensor.tensor_type.name}, which cannot be dequantized")
        if problems:
            raise CheckpointError(f"{self.path}: " + "\n  ".join(problems))

    @staticmethod
    def _dtype(tensor) -> str:
        kind = tensor.tensor_type.name
        return _PLAIN[kind].name if kind in _PLAIN else kind

    def _raw(self, name: str) -> np.ndarray:
        """One tensor, dequantized, rows in the order of the file."""
        import gguf

        tensor = self._stored[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        stored = np.fromfile(self.path, np.uint8, int(tensor.n_bytes), offset=int(tensor.data_offset))
        if plain := _PLAIN.get(tensor.tensor_type.name):
            return stored.view(plain).reshape(shape)
        return gguf.dequantize(stored.reshape(*shape[:-1], -1), tensor.tensor_type).reshape(shape)

    @property
    def rotary_pairs_adjacent(self) -> bool:
        return self.config["model_type"] == "llama"

    def read(self, name: str, as_stored: bool = False) -> np.ndarray:
        array = self._raw(name)
        part = _PERMUTED.fullmatch(name)
        if part is None or as_stored or not self.rotary_pairs_adjacent:
            return array
        heads = self.config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
        return unpermute(array, heads)

    def texts(self, tokenizer: Path | None, with_tokenizer: bool) -> dict[str, bytes]:
        found = {"config.json": json_bytes(self.config), "generation_config.json": json_bytes(self.generation_config)}
        if not with_tokenizer:
            return found
        if tokenizer is None:
            try:
                found["tokenizer.json"], notes = gguf_tokenizer.tokenizer_json(self.metadata)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {error}") from None
            self.notes += notes
        else:
            found["tokenizer.json"] = read_bytes(tokenizer)
        return found | gguf_tokenizer.texts(self.metadata)


@functools.cache
def _dequantizable(kind) -> bool:
    import gguf

    try:
        return (
            kind.name in _PLAIN
            or gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind).size > 0
        )
    except (NotImplementedError, KeyError):
        return False


def _open(file: Path):
    import gguf

    try:
        reader = gguf.GGUFReader(file)
    # A damaged file surfaces as whatever the reader happened to stumble over.
    except Exception as error:
        raise CheckpointError(f"{file}: not a readable GGUF file: {type(error).__name__}: {error}") from None
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise CheckpointError(f"{file}: a big-endian GGUF file, wanted little-endian")
    return reader


def _contents(file: Path, key: str, field) -> Any:
    try:
        return field.contents()
    except Exception as error:
        raise CheckpointError(f"{file}: {key}: cannot be read: {type(error).__name__}: {error}") from None
