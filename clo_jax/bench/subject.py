"""What a bench measures: a named architecture with random weights made on the device, or a checkpoint."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import checkpoints, memory, models
from clo_jax.bench import shapes
from clo_jax.cache import calibration as calibrations
from clo_jax.cache.calibration import Calibration
from clo_jax.cache.hardware import model_weight_bytes
from clo_jax.checkpoints.load import CheckpointInfo
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.eval.haystack import haystack
from clo_jax.planning import PlanOptions
from clo_jax.preparation import Preparation, Settings
from clo_jax.text import Tokenizer

_SPARE_TOKENS = 64  # generated prose is not longer than asked for by more
TIMEOUT_S = 60.0
RANDOM = "rbg"  # the generator of everything random: its programs compile in a quarter of the default's time


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """Make it with `find`. `name` says when layers are left out; `weights`: "random" or "checkpoint"."""

    name: str
    model: ModelConfig
    dtype: str
    weights: str
    whole: bool  # all layers
    info: CheckpointInfo | None = None

    @property
    def weight_bytes(self) -> int:
        """Of all matrices."""
        return model_weight_bytes(self.model, jnp.dtype(self.dtype).itemsize)

    @property
    def step_bytes(self) -> int:
        """Of the matrices that a decode step reads: all but an embedding table that is not the head as well."""
        table = 0 if self.model.tie_word_embeddings else self.model.vocab_size * self.model.hidden_size
        return self.weight_bytes - table * jnp.dtype(self.dtype).itemsize

    def describe(self) -> dict[str, Any]:
        """For results files."""
        return {
            "model": self.name, "weights": self.weights, "layers": self.model.num_layers, "dtype": self.dtype,
            "weight_bytes": self.weight_bytes,
        }  # fmt: skip

    def params(self) -> Any:
        """The parameters, on the device, in the form in which an `LLM` has them.

        Raises:
          MemoryPlanError: they do not fit there.
        """
        if self.info is None:
            found = memory.device()
            parts = {
                "parameters": self.weight_bytes,
                "packing": models.packing_bytes(self.model, jnp.dtype(self.dtype).itemsize),
            }
            if found is None:
                place = memory.Place("host memory", parts, memory.available_host_bytes(),
                                     "Take a smaller --shape or fewer --layers")  # fmt: skip
                memory.require(place)
            else:
                memory.require(*memory.device_places(parts, {}, found))
            return models.for_decoding(random_params(self.model, self.dtype))
        _, params, _ = checkpoints.load_checkpoint(self.info.path, dtype=self.dtype)
        kept = {layer: params["layers"][layer] for layer in range(self.model.num_layers)}
        del params["layers"]  # those left out are freed first
        return models.for_decoding(params | {"layers": kept})

    def prompts(self, batch: int, length: int) -> list[list[int]]:
        """Token ids: generated prose where there is a tokenizer, else random ones; another text for each sequence."""
        if self.info is not None and Tokenizer.available(self.info.path):
            tokenizer = Tokenizer.from_folder(self.info.path)
            texts = (haystack(length + _SPARE_TOKENS, tokenizer, seed) for seed in range(batch))
            return [tokenizer.encode(text)[:length] for text in texts]
        random = np.random.default_rng(0)
        return [[int(t) for t in random.integers(0, self.model.vocab_size, length)] for _ in range(batch)]

    def calibration(self, given: str | None = "auto") -> Calibration | None:
        """The checkpoint's, or that of a folder. A model without its last layers has none: it would not fit."""
        if self.info is None or not self.whole:
            return None
        return calibrations.find(given, self.info.path, self.info.manifest.source_files, self.model)

    def preparation(self, load: Mapping[str, Any], context: int) -> Preparation:
        """What prepares one policy for batches of up to `context` tokens.

        Args:
          load: the policy, as arguments of `LLM.load`.

        Raises:
          ValueError: settings that do not fit the model.
        """
        return Preparation(
            self.model,
            Settings(
                attention=load["attention"], clo=load.get("clo", CloConfig()), rival=load.get("rival"),
                max_context=context, dtype=self.dtype, kv_offload=load.get("kv_offload", True),
                backend=load.get("backend", "auto"), transfer_threads=load.get("transfer_threads"),
                timeout_s=TIMEOUT_S, head_scores=None, calibration=self.calibration(load.get("calibration", "auto")),
                plan=PlanOptions(load.get("planner", "none"), load.get("kv_budget"), False), pinning=None,
            ),
        )  # fmt: skip


def find(checkpoint: str | None, shape: str | None, layers: int | None, dtype: str) -> Subject:
    """The model that a command names.

    Args:
      checkpoint, shape: one of them. layers: None, or how many of the first layers to keep.
      dtype: "auto": the checkpoint's, bfloat16 for a shape.

    Raises:
      ValueError: none or both, an unknown shape, more layers than there are.
      CheckpointError: the folder is no readable checkpoint.
    """
    if checkpoint is not None and shape is not None:
        raise ValueError(f"--shape: got {shape!r} together with a checkpoint, wanted one of them")
    if checkpoint is None and shape is None:
        raise ValueError(f"--shape: got none, wanted a checkpoint or one of {', '.join(shapes.SHAPES)}")
    info = None
    if checkpoint is None:
        name, model, weights = shape, shapes.shape(shape), "random"
        dtype = "bfloat16" if dtype == "auto" else dtype
    else:
        model, info = checkpoints.read_info(checkpoint)
        name, weights, dtype = pathlib.Path(info.path).name, "checkpoint", info.dtype if dtype == "auto" else dtype
    kept = shapes.with_layers(model, layers)
    if kept != model:
        name = f"{name}, {kept.num_layers} of {model.num_layers} layers"
    return Subject(name, kept, dtype, weights, kept == model, info)


def random_params(model: ModelConfig, dtype: str) -> Any:
    """Distributed as `models.random_params`, but drawn tensor by tensor: equal layers share what is compiled."""
    number = 0

    def draw(path, leaf):
        nonlocal number
        number += 1
        kind = path[-1].key
        if kind == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        std = 0.02 if kind == "bias" else 1 / math.sqrt(leaf.shape[-1 if kind == "embedding" else 0])
        return _normal(leaf.shape, leaf.dtype, std, jax.random.key(number, impl=RANDOM))

    return jax.tree_util.tree_map_with_path(draw, models.abstract_params(model, jnp.dtype(dtype)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _normal(shape: tuple[int, ...], dtype: jnp.dtype, std: float, key: jax.Array) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(std, dtype)
