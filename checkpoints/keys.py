"""Hugging Face tensor names against paths of our parameter tree.

Kernels are stored [out, in] there and [in, out] here. Which leaves a model has (biases, head) is said by its abstract
parameters; this table only says what each is called. Llama and Qwen2 use the same names.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from clo_jax.checkpoints.source import Source
from clo_jax.errors import CheckpointError

Path = tuple[str | int, ...]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# (our path, Hugging Face name); a kernel is transposed.
_MODEL: dict[Path, str] = {
    ("embed", "embedding"): EMBEDDING,
    ("final_norm", "scale"): "model.norm.weight",
    ("lm_head", "kernel"): HEAD,
}
_LAYER: dict[Path, str] = {
    ("input_norm", "scale"): "input_layernorm.weight",
    ("post_norm", "scale"): "post_attention_layernorm.weight",
}
for _block, _theirs, _parts in (("attn", "self_attn", "qkvo"), ("mlp", "mlp", ("gate", "up", "down"))):
    for _part in _parts:
        _LAYER[_block, _part, "kernel"] = f"{_theirs}.{_part}_proj.weight"
        _LAYER[_block, _part, "bias"] = f"{_theirs}.{_part}_proj.bias"

# Buffers that older exports wrote and that transformers does not read either: they follow from the configuration.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor: its Hugging Face name, our path, our shape, and whether it is transposed on the way."""

    name: str
    path: Path
    shape: tuple[int, ...]
    transposed: bool

    @property
    def source_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def ours(self) -> str:
        return path_name(self.path)


def path_name(path: Path) -> str:
    return "/".join(map(str, path))


def flatten(tree: Mapping[Any, Any], prefix: Path = ()) -> dict[Path, Any]:
    """Leaves of nested dicts by path."""
    leaves: dict[Path, Any] = {}
    for key, value in tree.items():
        leaves.update(flatten(value, (*prefix, key)) if isinstance(value, Mapping) else {(*prefix, key): value})
    return leaves


def unflatten(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def hf_name(path: Path) -> str:
    """Hugging Face name of one of our leaves."""
    if path[0] == "layers":
        return f"model.layers.{path[1]}.{_LAYER[path[2:]]}"
    return _MODEL[path]


def entries(abstract: Mapping[Any, Any]) -> list[Entry]:
    """The table for one model.

    Args:
      abstract: nested dicts of `jax.ShapeDtypeStruct`, as `models.abstract_params` gives.
    """
    return [
        Entry(hf_name(path), path, tuple(leaf.shape), path[-1] == "kernel") for path, leaf in flatten(abstract).items()
    ]


def match(source: Source, abstract: Mapping[Any, Any]) -> list[Entry]:
    """Entries of `abstract`, after a check that the source holds exactly them, in these shapes.

    Raises:
      CheckpointError: lists every missing, unexpected and misshapen tensor at once, by both names; names the shard
        index and the config key when only the output head is missing; refuses a tied model whose extra output head
        differs from its embedding.
    """
    table = {entry.name: entry for entry in entries(abstract)}
    tied = HEAD not in table
    problems = []
    for name, entry in table.items():
        info = source.tensors.get(name)
        if info is None and name == HEAD:
            problems.append(
                f"{HEAD} ({entry.ours}) is missing in {source.index_file}, but the model is untied: "
                "set tie_word_embeddings to true in config.json if the head is the embedding"
            )
        elif info is None:
            problems.append(f"missing: {name} ({entry.ours})")
        elif info.shape != entry.source_shape:
            problems.append(
                f"wrong shape: {info.stored_name} ({entry.ours}): got {list(info.shape)}, "
                f"wanted {list(entry.source_shape)}"
            )
    for name, info in source.tensors.items():
        if name not in table and not _DERIVED.fullmatch(name) and not (tied and name == HEAD):
            problems.append(f"unexpected: {info.stored_name} {list(info.shape)} in {info.file.name}")
    if problems:
        raise CheckpointError(f"{source.path}: tensors do not match config.json:\n  " + "\n  ".join(problems))
    if tied and HEAD in source.tensors and not np.array_equal(source.read(HEAD), source.read(EMBEDDING)):
        raise CheckpointError(
            f"{source.path}: {HEAD} differs from {EMBEDDING}, but config.json has tie_word_embeddings true; "
            "set it to false if the model has a head of its own"
        )
    return list(table.values())


def to_ours(array: np.ndarray, entry: Entry, dtype: np.dtype) -> np.ndarray:
    """The tensor in our layout and `dtype`, contiguous."""
    out = np.empty(entry.shape, dtype)
    out[...] = array.T if entry.transposed else array
    return out
