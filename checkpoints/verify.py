"""Checks a converted checkpoint against its source: every tensor, and the logits of a short prompt.

The logits of the source are computed in NumPy straight from the tensors as the source stores them ([out, in] kernels;
for a GGUF Llama with rotary pairs as neighbours), those of the checkpoint by our models, so that a wrong name,
transpose or permutation shows however it came about. Both walk layer by layer: one layer is in memory at a time.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.checkpoints import keys, orbax_io
from clo_jax.checkpoints.source import Source
from clo_jax.config import ModelConfig
from clo_jax.errors import CheckpointError
from clo_jax.models import abstract_params, merge, merge_layer, rotation

_PROMPT_TOKENS = 12
# Both sides compute in float32 in different orders.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Verification:
    """`num_tensors` compared, all equal. `logit_difference`: largest absolute one over a random prompt, in float32;
    `logit_scale`: largest absolute logit."""

    num_tensors: int
    logit_difference: float
    logit_scale: float


def verify(
    source: Source, item: Path, config: ModelConfig, dtype: str, progress: Callable[[int], None] | None = None
) -> Verification:
    """Reads both again and compares.

    Args:
      item: the Orbax item.
      dtype: that the item was written in; tensors of the source are rounded to it.
      progress: called with the bytes of parameters compared since its last call.

    Raises:
      CheckpointError: names the first tensor that differs, or tells how far the logits are apart.
    """
    dtype = jnp.dtype(dtype)
    table = keys.match(source, abstract_params(config, dtype))

    def checked(group: list[keys.Entry]) -> dict[Any, Any]:
        """These parameters of the item, in float32, after a comparison with the source."""
        wanted = {entry.path: jax.ShapeDtypeStruct(entry.shape, dtype) for entry in group}
        loaded = orbax_io.load(item, keys.unflatten({e.path: wanted.get(e.path) for e in table}))
        leaves = keys.flatten(loaded)
        for entry in group:
            array = keys.to_ours(source.read(entry.name), entry, dtype)
            if array.tobytes() != np.asarray(leaves[entry.path]).tobytes():
                raise CheckpointError(f"{item}: {entry.ours} differs from {entry.name} in {source.path}")
            if progress is not None:
                progress(array.nbytes)
        return keys.unflatten({entry.path: leaves[entry.path].astype(jnp.float32) for entry in group})

    tokens = np.random.default_rng(0).integers(0, config.vocab_size, _PROMPT_TOKENS)
    ours, theirs = _our_logits(checked, table, config, tokens), _source_logits(source, config, dtype, tokens)
    difference, scale = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
    if not difference <= _TOLERANCE * max(1.0, scale):
        raise CheckpointError(f"{item}: logits differ from those of {source.path} by {difference:.3g} of {scale:.3g}")
    return Verification(len(table), difference, scale)


def _rope(config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    positions = jnp.arange(_PROMPT_TOKENS, dtype=jnp.int32)[None]
    return rotation(config, positions, jnp.full((1,), _PROMPT_TOKENS, jnp.int32))


def _causal(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of q [N, H, D] over k, v [N, K, D] -> [N, H, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("nhd,mhd->hnm", q, k) / np.float32(np.sqrt(q.shape[-1]))
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hnm,mhd->nhd", weights / weights.sum(-1, keepdims=True), v)


def _our_logits(
    checked: Callable[[list[keys.Entry]], dict[Any, Any]],
    table: list[keys.Entry],
    config: ModelConfig,
    tokens: np.ndarray,
) -> np.ndarray:
    """[N, V] by our models in float32, from the parameters that `checked` gives, one layer at a time."""
    layers: dict[int, list[keys.Entry]] = {}
    for entry in table:
        if entry.path[0] == "layers":
            layers.setdefault(entry.path[1], []).append(entry)
    around_params = checked([entry for entry in table if entry.path[0] != "layers"])
    rope = _rope(config)

    @jax.jit
    def query_key_value(layer: Mapping, x: jax.Array):
        return merge_layer(config, layer).qkv(x, rope)

    @jax.jit
    def finish(layer: Mapping, x: jax.Array, attended: jax.Array):
        return merge_layer(config, layer).finish(x, attended)

    x = jnp.take(around_params["embed"]["embedding"], jnp.asarray(tokens, jnp.int32), axis=0)[None]
    for index, group in layers.items():
        layer = checked(group)["layers"][index]
        q, k, v = (np.asarray(heads)[0] for heads in query_key_value(layer, x))
        x = finish(layer, x, jnp.asarray(_causal(q, k, v))[None])
    # What is around the layers is a model of one layer; which one does not matter.
    around = merge(dataclasses.replace(config, num_layers=1), {**around_params, "layers": {0: layer}})
    return np.asarray(around.logits(x))[0]


def _source_logits(source: Source, config: ModelConfig, dtype: np.dtype, tokens: np.ndarray) -> np.ndarray:
    """[N, V] in NumPy from the source's own tensors, rounded to `dtype`, in float32."""

    def read(name: str) -> np.ndarray:
        return source.read(name, as_stored=True).astype(dtype).astype(np.float32)

    def project(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ read(f"{name}.weight").T
        return y + read(f"{name}.bias") if f"{name}.bias" in source.tensors else y

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + np.float32(config.rms_norm_eps)) * read(f"{name}.weight")

    cos, sin = (np.asarray(part)[0][:, None] for part in _rope(config))

    def rotate(x: np.ndarray) -> np.ndarray:
        if source.rotary_pairs_adjacent:
            first, second = x[..., ::2], x[..., 1::2]
            return np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    x = read(keys.EMBEDDING)[tokens]
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        normed = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (
            project(normed, f"{prefix}.self_attn.{part}_proj").reshape(len(x), -1, config.head_dim) for part in "qkv"
        )
        attended = _causal(rotate(q), rotate(k), v).reshape(len(x), -1)
        x = x + project(attended, f"{prefix}.self_attn.o_proj")
        normed = norm(x, f"{prefix}.post_attention_layernorm")
        gate = project(normed, f"{prefix}.mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * project(normed, f"{prefix}.mlp.up_proj")
        x = x + project(inner, f"{prefix}.mlp.down_proj")
    head = keys.EMBEDDING if config.tie_word_embeddings else keys.HEAD
    return norm(x, "model.norm") @ read(head).T
