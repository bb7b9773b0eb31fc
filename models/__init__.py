"""Decoder models (Flax NNX) over plain nested dicts of parameters.

A model is merged from its parameters inside the jitted function that uses it, so that what crosses the jit boundary is
an ordinary pytree: `model = merge(config, params)`. Parameters are plain, as stored and trained, or packed, as decoding
reads them fastest on a GPU: `params = pack(params)`.
"""

from clo_jax.models.build import abstract_params, build, merge, merge_layer, random_params
from clo_jax.models.config import config_from_hf
from clo_jax.models.packed import for_decoding, pack, packing_bytes
from clo_jax.models.rope import rotation

__all__ = [
    "abstract_params", "build", "config_from_hf", "for_decoding", "merge", "merge_layer", "pack", "packing_bytes",
    "random_params", "rotation",
]  # fmt: skip
