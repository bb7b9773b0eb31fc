"""The packed form of the parameters: what decoding reads fastest.

A decode step multiplies matrices by one row a sequence, and takes as long as the matrices take to be read. Kernels are
[out, in], so that a product sums over contiguous memory, and those that share their input are one kernel: one larger
product instead of two. The query's stays by itself, because the guess of the next layer's query reads it alone, and a
slice of a joined kernel would be copied at every step. That is so on a GPU; XLA's CPU programs gain for one sequence in
float32 and lose for several and in bfloat16, so that `for_decoding` packs on a GPU alone.

The nesting: layers/<int>/attn/{q, kv, o}/{kernel [out, in], bias?} with k before v, layers/<int>/mlp/{gate_up, down}
with gate before up; lm_head/kernel [V, hidden] unless the embeddings are tied. Norms and the embedding are as in the
plain nesting (`clo_jax.models.build`).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from clo_jax.config import ModelConfig
from clo_jax.models.layers import MLP, PLAIN, Form, Head, Linear, Projections

# Module and name of each packed linear layer -> those that it is made of.
_JOINED = {
    "attn": {"q": ("q",), "kv": ("k", "v"), "o": ("o",)},
    "mlp": {"gate_up": ("gate", "up"), "down": ("down",)},
}

FASTER_ON = ("gpu",)  # JAX backends


class PackedProjections(Projections):
    """Key and value in one product."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden, wide = config.hidden_size, config.num_heads * config.head_dim
        narrow = config.num_kv_heads * config.head_dim
        self.q = Linear(hidden, wide, config.qkv_bias, dtype, rngs, transposed=True)
        self.kv = Linear(hidden, 2 * narrow, config.qkv_bias, dtype, rngs, transposed=True)
        self.o = Linear(wide, hidden, config.output_bias, dtype, rngs, transposed=True)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.q(x), *jnp.split(self.kv(x), 2, axis=-1)


class PackedMLP(MLP):
    """Gate and up in one product."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(hidden, 2 * inner, config.mlp_bias, dtype, rngs, transposed=True)
        self.down = Linear(inner, hidden, config.mlp_bias, dtype, rngs, transposed=True)

    def gate_and_up(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return gate, up


PACKED = Form(PackedProjections, PackedMLP, functools.partial(Head, transposed=True))

_NAMES = {
    PLAIN: {module: {name for parts in joined.values() for name in parts} for module, joined in _JOINED.items()},
    PACKED: {module: set(joined) for module, joined in _JOINED.items()},
}


def form_of_layer(layer: Mapping[str, Any]) -> Form:
    """The form of one layer's parameters. Raises ValueError for a nesting that is neither plain nor packed."""
    found = {module: set(layer.get(module, ())) for module in _JOINED}
    for form, names in _NAMES.items():
        if found == names:
            return form
    got, plain, packed = (
        {module: sorted(names[module]) for module in _JOINED} for names in (found, _NAMES[PLAIN], _NAMES[PACKED])
    )
    raise ValueError(f"params: got a layer with {got}, wanted {plain} (plain) or {packed} (packed)")


def form_of(params: Mapping[str, Any]) -> Form:
    """The form of a model's parameters, by their first layer. Raises ValueError as `form_of_layer`."""
    if not params.get("layers"):
        raise ValueError(f"params: got {sorted(params)}, wanted layers among them")
    return form_of_layer(next(iter(params["layers"].values())))


def for_decoding(params: Mapping[str, Any], keep: bool = False) -> Mapping[str, Any]:
    """Plain parameters in the form that is decoded fastest where JAX runs: packed (see `pack`, also for errors and what
    is consumed), or as they are."""
    return pack(params, keep) if jax.default_backend() in FASTER_ON else params


def packing_bytes(config: ModelConfig, itemsize: int) -> int:
    """What `for_decoding` needs beside the parameters: bytes of the largest packed kernel, or none."""
    if jax.default_backend() not in FASTER_ON:
        return 0
    hidden, head = config.hidden_size, 0 if config.tie_word_embeddings else config.vocab_size
    wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return itemsize * hidden * max(wide, 2 * narrow, 2 * config.intermediate_size, head)


def pack(params: Mapping[str, Any], keep: bool = False) -> dict[Any, Any]:
    """The packed form of a model's parameters. Not under jit: it frees memory as it goes.

    Args:
      params: nested dicts of arrays, the plain nesting of `clo_jax.models.build`, each array in one place. An array of
        several devices stays on them: XLA chooses the sharding of what it becomes part of. NumPy's go to the default
        device. Consumed: an array is deleted as soon as the one that it became part of is there, so that no more than
        one packed kernel ever exists twice. Norms, the embedding and biases that are not joined are shared with the
        result; NumPy arrays are left alone.
      keep: leave `params` usable; the packed kernels are then a second copy.

    Raises:
      ValueError: packed parameters, or another nesting. Nothing is consumed then.
    """
    forms = {form_of(params), *(form_of_layer(layer) for layer in params["layers"].values())}
    if forms != {PLAIN}:
        raise ValueError("params: got packed parameters, wanted plain ones, the nesting of clo_jax.models.build")
    packed = dict(params)
    packed["layers"] = {index: _pack_layer(layer, keep) for index, layer in params["layers"].items()}
    if "lm_head" in params:
        packed["lm_head"] = {"kernel": _joined([params["lm_head"]["kernel"]], keep)}
    return packed


def _pack_layer(layer: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    packed = dict(layer)
    for module, joined in _JOINED.items():
        packed[module] = {
            name: {
                leaf: _joined([layer[module][part][leaf] for part in parts], keep) for leaf in layer[module][parts[0]]
            }
            for name, parts in joined.items()
        }
    return packed


def _joined(arrays: Sequence[Any], keep: bool) -> Any:
    """Kernels [in, out] to one [outs, in], biases to one."""
    if len(arrays) == 1 and arrays[0].ndim == 1:
        return arrays[0]
    joined = jax.block_until_ready(_join(*arrays))
    for array in arrays:
        if isinstance(array, jax.Array) and not keep:
            array.delete()
    return joined


@jax.jit
def _join(*arrays: jax.Array) -> jax.Array:
    return jnp.concatenate([array.T for array in arrays])
