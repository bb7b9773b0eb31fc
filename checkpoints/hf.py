"""A Hugging Face folder: config.json, safetensors (one file, or shards under an index), tokenizer files.

Tensors are read with plain file reads and not through a memory map, so that the peak of resident memory is one tensor
and not the whole file.
"""

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from clo_jax.checkpoints.files import read_bytes, read_json, read_json_if_there
from clo_jax.checkpoints.source import TensorInfo
from clo_jax.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_TEXTS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class HuggingFaceFolder:
    """A `Source` (see source.py) over a folder. The whole header work is done, and every defect found, at construction.

    Raises:
      CheckpointError: a missing or malformed file, a missing shard, a tensor in two shards, in the wrong one or in
        none, a dtype other than fp32, fp16 and bf16.
    """

    kind = "safetensors"
    rotary_pairs_adjacent = False

    def __init__(self, folder: Path):
        self.path = folder
        self.notes: tuple[str, ...] = ()
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self.generation_config = read_json_if_there(folder / "generation_config.json")
        if (folder / _SINGLE).exists():
            self.index_file = folder / _SINGLE
            self.files = (folder / _SINGLE,)
            headers = {self.index_file: _header(self.index_file)}
        elif (folder / _INDEX).exists():
            self.index_file = folder / _INDEX
            headers = _sharded(self.index_file)
            self.files = (self.index_file, *headers)
        else:
            raise CheckpointError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there")
        self.files = (folder / "config.json", *self.files)
        self._offsets: dict[str, int] = {}
        self.tensors: dict[str, TensorInfo] = {}
        unknown = []
        for file, header in headers.items():
            for name, (dtype, shape, offset) in header.items():
                if dtype not in _DTYPES:
                    unknown.append(f"{name} in {file.name} is {dtype}")
                    continue
                self._offsets[name] = offset
                self.tensors[name] = TensorInfo(shape, _DTYPES[dtype].name, name, file)
        if unknown:
            raise CheckpointError(
                f"{folder}: dtypes other than F32, F16 and BF16 are not supported:\n  " + "\n  ".join(unknown)
            )

    def read(self, name: str, as_stored: bool = False) -> np.ndarray:
        info = self.tensors[name]
        dtype = np.dtype(info.dtype)
        count = int(np.prod(info.shape, dtype=np.int64))
        array = np.fromfile(info.file, dtype, count, offset=self._offsets[name])
        if array.size != count:
            raise CheckpointError(f"{info.file}: ends inside tensor {name}")
        return array.reshape(info.shape)

    def texts(self, tokenizer: Path | None, with_tokenizer: bool) -> dict[str, bytes]:
        found = {name: read_bytes(self.path / name) for name in _TEXTS if (self.path / name).exists()}
        found["config.json"] = read_bytes(self.path / "config.json")
        source = tokenizer or self.path / "tokenizer.json"
        if with_tokenizer and (tokenizer is not None or source.exists()):
            found["tokenizer.json"] = read_bytes(source)
        elif with_tokenizer:
            self.notes += (f"{source} is not there: the checkpoint takes and gives token ids only",)
        return found


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """(dtype name, shape, offset in the file) by tensor name. The library checks the header; it does not tell offsets,
    so the header is read a second time for those."""
    try:
        with safetensors.safe_open(file, framework="numpy"):
            pass
        with open(file, "rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
    except (safetensors.SafetensorError, OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _sharded(index_file: Path) -> dict[Path, dict[str, tuple[str, tuple[int, ...], int]]]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index_file}: weight_map: got {type(weight_map).__name__}, wanted names of shards")
    shards = sorted(set(weight_map.values()))
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise CheckpointError(f"{index_file}: weight_map: shards outside the folder: {', '.join(outside)}")
    if missing := [shard for shard in shards if not (index_file.parent / shard).exists()]:
        raise CheckpointError(f"{index_file}: missing shards: {', '.join(missing)}")
    headers = {index_file.parent / shard: _header(index_file.parent / shard) for shard in shards}
    counts = Counter(name for header in headers.values() for name in header)
    problems = [f"tensor {name} is in {count} shards" for name, count in counts.items() if count > 1]
    problems += [f"tensor {name} is in a shard but not in the index" for name in counts if name not in weight_map]
    problems += [
        f"tensor {name} is not in its shard {shard}"
        for name, shard in weight_map.items()
        if name not in headers[index_file.parent / shard]
    ]
    if problems:
        raise CheckpointError(f"{index_file}: index and shards disagree:\n  " + "\n  ".join(problems))
    return headers
