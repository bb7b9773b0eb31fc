"""Layers that the model families share. Matrix products run in the dtype of the activations; norms and rotary embedding
in float32. Attention itself is no part of a layer: it sits between `DecoderLayer.qkv` and `.finish`, where the policies
and their caches are."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from clo_jax.config import ModelConfig
from clo_jax.models import rope as rope_lib
from clo_jax.ops.add_norms import add_norms

Rope = tuple[jax.Array, jax.Array]


def matmul(x: jax.Array, kernel: jax.Array, contract: int, out: jnp.dtype | None = None) -> jax.Array:
    """x [..., in] times kernel over its axis `contract`. Float32 means float32: no reduced precision on a GPU."""
    return jax.lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (contract,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out,
    )


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, dtype: jnp.dtype) -> nnx.Param:
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * scale).astype(dtype))


class Linear(nnx.Module):
    """y = x · kernel (+ bias); kernel [in, out], or [out, in] of a transposed one."""

    def __init__(
        self, size_in: int, size_out: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs, transposed: bool = False
    ):
        shape = (size_out, size_in) if transposed else (size_in, size_out)
        self.contract = int(transposed)
        self.kernel = _normal(rngs, shape, size_in**-0.5, dtype)
        if bias:
            self.bias = _normal(rngs, (size_out,), 0.02, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.kernel[...], self.contract)
        if hasattr(self, "bias"):
            y = y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))
        return y


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, float32 inside."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (normed * scale).astype(x.dtype)


def add_and_norm(x: jax.Array, y: jax.Array, norms: Sequence[RMSNorm]) -> tuple[jax.Array, ...]:
    """x + y [..., hidden] and one or two norms, of equal eps, of it. For decoding: one kernel on a GPU."""
    return add_norms(x, y, [norm.scale[...] for norm in norms], norms[0].eps)


class Projections(nnx.Module):
    """The four projections around attention."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden, wide = config.hidden_size, config.num_heads * config.head_dim
        narrow = config.num_kv_heads * config.head_dim
        self.q = Linear(hidden, wide, config.qkv_bias, dtype, rngs)
        self.k = Linear(hidden, narrow, config.qkv_bias, dtype, rngs)
        self.v = Linear(hidden, narrow, config.qkv_bias, dtype, rngs)
        self.o = Linear(wide, hidden, config.output_bias, dtype, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query [..., H·D], key and value [..., K·D] of the normed stream [..., hidden]."""
        return self.q(x), self.k(x), self.v(x)


class MLP(nnx.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate = Linear(hidden, inner, config.mlp_bias, dtype, rngs)
        self.up = Linear(hidden, inner, config.mlp_bias, dtype, rngs)
        self.down = Linear(inner, hidden, config.mlp_bias, dtype, rngs)

    def gate_and_up(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., intermediate] each."""
        return self.gate(x), self.up(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate_and_up(x)
        return self.down(jax.nn.silu(gate) * up)


class Head(nnx.Module):
    """Output projection [hidden, V] of a model with untied embeddings; [V, hidden] of a transposed one."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, transposed: bool = False):
        shape = (config.hidden_size, config.vocab_size)
        self.contract = int(transposed)
        self.kernel = _normal(rngs, shape[::-1] if transposed else shape, config.hidden_size**-0.5, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits, float32."""
        return matmul(x, self.kernel[...], self.contract, jnp.float32)


class Form(NamedTuple):
    """How kernels are stored: the modules that hold them. Everything else is the same in each form."""

    projections: Callable[[ModelConfig, jnp.dtype, nnx.Rngs], Projections]
    mlp: Callable[[ModelConfig, jnp.dtype, nnx.Rngs], MLP]
    head: Callable[[ModelConfig, jnp.dtype, nnx.Rngs], Head]


PLAIN = Form(Projections, MLP, Head)  # one kernel a projection, [in, out]


class DecoderLayer(nnx.Module):
    """One layer, cut open at its attention."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, form: Form = PLAIN):
        self.head_dim = config.head_dim
        self.attn = form.projections(config, dtype, rngs)
        self.mlp = form.mlp(config, dtype, rngs)
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def query_of(self, normed: jax.Array, rope: Rope) -> jax.Array:
        """Rotated queries [B, N, H, D] of the stream after `input_norm` [B, N, hidden]."""
        return rope_lib.rotate(self._heads(self.attn.q(normed)), rope)

    def qkv_of(self, normed: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B, N, H, D], rotated keys and values [B, N, K, D] of the stream after `input_norm`."""
        q, k, v = (self._heads(part) for part in self.attn(normed))
        return rope_lib.rotate(q, rope), rope_lib.rotate(k, rope), v

    def project(self, attended: jax.Array) -> jax.Array:
        """What attention adds to the stream [B, N, hidden], of what the heads attended to [B, N, H, D]."""
        return self.attn.o(attended.reshape(*attended.shape[:-2], -1))

    def query(self, x: jax.Array, rope: Rope) -> jax.Array:
        """`query_of` the residual stream x [B, N, hidden]."""
        return self.query_of(self.input_norm(x), rope)

    def qkv(self, x: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`qkv_of` the residual stream x [B, N, hidden]."""
        return self.qkv_of(self.input_norm(x), rope)

    def add_attention(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """The residual stream [B, N, hidden] between attention and MLP, from the layer's input x and what its heads
        attended to [B, N, H, D]."""
        return x + self.project(attended)

    def add_mlp(self, x: jax.Array) -> jax.Array:
        """The layer's output [B, N, hidden] from the stream between attention and MLP."""
        return x + self.mlp(self.post_norm(x))

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """The layer's output [B, N, hidden] from its input x and what its heads attended to [B, N, H, D]."""
        return self.add_mlp(self.add_attention(x, attended))


class Embed(nnx.Module):
    """Token embedding [V, hidden], and the head of a model with tied embeddings."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embedding = _normal(rngs, (config.vocab_size, config.hidden_size), config.hidden_size**-0.5, dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.embedding[...], tokens, axis=0, mode="clip")

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits, float32."""
        return matmul(x, self.embedding[...], 1, jnp.float32)


class Decoder(nnx.Module):
    """Embedding, unrolled layers, final norm and head. Holds parameters only; the KV cache is the caller's."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, form: Form = PLAIN):
        self.config = config
        self.embed = Embed(config, dtype, rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype, rngs, form) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = form.head(config, dtype, rngs)

    def rope(self, positions: jax.Array, seq_len: jax.Array) -> Rope:
        """See `clo_jax.models.rope.rotation`."""
        return rope_lib.rotation(self.config, positions, seq_len)

    def logits_of(self, normed: jax.Array) -> jax.Array:
        """Logits float32 [B, N, V] of the stream after `final_norm` [B, N, hidden]."""
        return self.embed.attend(normed) if self.config.tie_word_embeddings else self.lm_head(normed)

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits float32 [B, N, V] of the last layer's output x [B, N, hidden]."""
        return self.logits_of(self.final_norm(x))
