"""From an architecture to modules and parameters: graph definitions are made once per architecture, so that merging
costs a walk over the tree and no initialisation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from clo_jax.config import ModelConfig
from clo_jax.models import llama, qwen
from clo_jax.models.layers import PLAIN, Decoder, DecoderLayer, Form
from clo_jax.models.packed import form_of, form_of_layer

Params = dict[Any, Any]

_CLASSES: dict[str, type[Decoder]] = {llama.MODEL_TYPE: llama.Llama, qwen.MODEL_TYPE: qwen.Qwen2}


def _initialise(config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, form: Form = PLAIN) -> Decoder:
    return _CLASSES[config.architecture](config, dtype, rngs, form)


@functools.lru_cache(maxsize=32)
def build(config: ModelConfig, dtype: jnp.dtype, form: Form = PLAIN) -> tuple[nnx.GraphDef, Params]:
    """Graph definition of the model, and its parameters as nested dicts of `jax.ShapeDtypeStruct`; allocates nothing.

    The plain nesting (`clo_jax.models.packed` has that of the packed form):
    embed/embedding [V, hidden]; layers/<int>/attn/{q,k,v,o}/{kernel [in, out], bias?},
    layers/<int>/mlp/{gate,up,down}/{kernel, bias?}, layers/<int>/{input_norm,post_norm}/scale; final_norm/scale;
    lm_head/kernel [hidden, V] unless the embeddings are tied.
    """
    abstract = nnx.eval_shape(lambda: _initialise(config, jnp.dtype(dtype), nnx.Rngs(0), form))
    graphdef, state = nnx.split(abstract)
    return graphdef, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.to_pure_dict(state))


@functools.lru_cache(maxsize=32)
def _layer_graphdef(config: ModelConfig, form: Form) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: DecoderLayer(config, jnp.dtype(jnp.float32), nnx.Rngs(0), form)))


def abstract_params(config: ModelConfig, dtype: jnp.dtype) -> Params:
    """The parameters as nested dicts of `jax.ShapeDtypeStruct` (see `build`): a fresh tree at every call."""
    return jax.tree.map(lambda leaf: leaf, build(config, jnp.dtype(dtype))[1])


def merge(config: ModelConfig, params: Params) -> Decoder:
    """The model over `params`, plain (the nesting of `build`) or packed. Cheap; meant to be called under jit.

    Raises:
      ValueError: another nesting.
    """
    return nnx.merge(build(config, jnp.dtype(jnp.float32), form_of(params))[0], params)


def merge_layer(config: ModelConfig, params: Params) -> DecoderLayer:
    """One layer over `params["layers"][i]`, plain or packed. Equal for all layers, so that one jitted function serves
    each of them.

    Raises:
      ValueError: another nesting.
    """
    return nnx.merge(_layer_graphdef(config, form_of_layer(params)), params)


def random_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype) -> Params:
    """Random parameters: kernels normal with variance 1 / fan-in, biases normal (0.02), norms one."""
    return _random(config, jnp.dtype(dtype), key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(config: ModelConfig, dtype: jnp.dtype, key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(_initialise(config, dtype, nnx.Rngs(params=key))))
