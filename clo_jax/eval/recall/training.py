"""Training of the recall model: short contexts first, longer ones as soon as it answers right, distances up to the
longest from the third phase on. Batches are made on the device, so that nothing is read or copied."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clo_jax import models
from clo_jax.config import ModelConfig, RopeConfig
from clo_jax.eval.recall import chains
from clo_jax.ops.causal_attention import implementation

LONGEST = 131072 + 2048
_STEPS_PER_CALL = 25
_CUTS = 16  # jumps of positions in a context
_MULTIPLE = 128  # of tokens, for cuDNN's attention and its gradient
_WARMUP = 200  # steps


def model_config() -> ModelConfig:
    """4.8 million parameters; G = 5. The base of the rotation leaves two fifths of a head's dimensions slow enough to
    compare what stands 130,000 tokens apart: 52."""
    return ModelConfig(
        "qwen2", chains.VOCAB, 256, 512, 4, 10, 2, 128, 1e-6, LONGEST, RopeConfig(5e8), tie_word_embeddings=True,
        qkv_bias=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Phase:
    """A length. It ends after `steps`, or earlier once a call's lookups are right to `enough`."""

    records: int
    batch: int
    segments: int
    steps: int
    enough: float = 0.995
    hops: int = 8
    limit: int = LONGEST  # of positions

    @property
    def length(self) -> int:
        return chains.num_tokens(self.records, self.segments, self.hops)


PHASES = (
    Phase(8, 256, 2, 4000, 0.97, limit=256),
    Phase(24, 128, 4, 4000, 0.97, limit=512),
    Phase(24, 128, 4, 4000, 0.97),
    Phase(160, 40, 4, 3000, 0.98),
    Phase(640, 16, 8, 1500, 0.99),
    Phase(2600, 4, 16, 800, 0.99),
    Phase(5200, 3, 32, 300, 0.999),
    Phase(10400, 2, 32, 200, 2.0),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How it is trained: the phases in turn, at a constant rate that falls to nothing over the last of them."""

    phases: tuple[Phase, ...] = PHASES
    rate: float = 1e-3
    decay: float = 0.01
    seed: int = 0


class Progress(NamedTuple):
    """What the callback gets after every few steps."""

    phase: int
    step: int  # of the phase
    length: int  # tokens
    loss: float
    right: float  # share of looked-up tokens that are right


def train(
    config: ModelConfig, settings: Settings, progress: Callable[[Progress], None] = lambda done: None
) -> dict[Any, Any]:
    """Parameters float32 of a trained model."""
    params = models.random_params(config, jax.random.key(settings.seed), jnp.float32)
    state = _optimiser().init(params)
    done = 0
    for number, phase in enumerate(settings.phases):
        last = number == len(settings.phases) - 1
        for step in range(0, phase.steps, _STEPS_PER_CALL):
            counts = np.arange(step, step + _STEPS_PER_CALL)
            rates = settings.rate * np.minimum(1.0, (done + counts - step + 1) / _WARMUP)
            if last:
                rates = rates * 0.5 * (1 + np.cos(np.pi * np.minimum(counts / phase.steps, 1.0)))
            key = jax.random.fold_in(jax.random.key(settings.seed), 1 + done)
            params, state, loss, right = _some_steps(
                config, phase, settings.decay, params, state, key, jnp.asarray(rates, jnp.float32)
            )
            done += _STEPS_PER_CALL
            progress(Progress(number, step + _STEPS_PER_CALL, phase.length, float(loss), float(right)))
            if right >= phase.enough:
                break
    return params


def _optimiser() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def _some_steps(config: ModelConfig, phase: Phase, decay: float, params, state, key: jax.Array, rates: jax.Array):
    """One optimiser step for each of `rates`. Returns parameters, state, mean loss, share of lookups that are right."""

    def step(carry, x):
        params, state = carry
        key, rate = x
        (loss, right), grads = jax.value_and_grad(_loss, argnums=2, has_aux=True)(config, phase, params, key)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            updates, state = _optimiser().update(grads, state, params)
        params = jax.tree.map(lambda p, u: p - rate * (u + decay * p), params, updates)
        return (params, state), (loss, right)

    (params, state), (loss, right) = jax.lax.scan(step, (params, state), (jax.random.split(key, len(rates)), rates))
    return params, state, loss.mean(), right.mean()


def _loss(config: ModelConfig, phase: Phase, params, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of the tokens that can be known, and the share of looked-up ones that are the likeliest."""

    def one(key):
        of_chains, of_positions = jax.random.split(key)
        made = chains.draw(of_chains, phase.records, phase.segments, phase.hops)
        return made, chains.spread_positions(of_positions, phase.records, phase.length, phase.limit, _CUTS)

    made, positions = jax.vmap(one)(jax.random.split(key, phase.batch))
    logits = forward(config, params, made.tokens, positions, 1 + chains.RECORD * phase.records)
    start = made.tokens.shape[1] - logits.shape[1]
    targets = jnp.roll(made.tokens, -1, axis=1)[:, start:]
    known = made.known[:, start:].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    # Looked up: what follows <value>, and the symbol after that.
    here, before = made.tokens[:, start:], made.tokens[:, start - 1 : -1]
    looked = known * ((here == chains.VALUE) | (before == chains.VALUE)).astype(jnp.float32)
    hits = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    return jnp.sum(losses * known) / known.sum(), jnp.sum(hits * looked) / looked.sum()


def forward(config: ModelConfig, params, tokens: jax.Array, positions: jax.Array, start: int) -> jax.Array:
    """Logits float32 [B, N - start, V] of tokens [B, N] at `positions`, from token `start` on. In 16 bits on a GPU."""
    half = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    params = jax.tree.map(lambda leaf: leaf.astype(half), params)
    model = models.merge(config, params)
    length = tokens.shape[1]
    behind = ((0, 0), (0, -length % _MULTIPLE))  # nothing before the padding sees it
    tokens, positions = jnp.pad(tokens, behind), jnp.pad(positions, behind, mode="edge")
    x = model.embed(tokens)
    rope = models.rotation(config, positions, jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32))

    @jax.checkpoint
    def layer(layer_params, x):
        module = models.merge_layer(config, layer_params)
        kind = "cudnn" if implementation(x.dtype, config.head_dim) == "cudnn" else "xla"
        return module.finish(x, jax.nn.dot_product_attention(*module.qkv(x, rope), is_causal=True, implementation=kind))

    for index in range(config.num_layers):
        x = layer(params["layers"][index], x)
    return model.logits(x[:, start:length])


def lookups_right(config: ModelConfig, params, seeds: Sequence[int], records: int, hops: int) -> float:
    """Share of looked-up tokens that are right, with positions as they are read: contexts of `records`, one each."""
    phase = Phase(records, 1, 1, _STEPS_PER_CALL, hops=hops, limit=chains.num_tokens(records, 1, hops))
    judge = jax.jit(_loss, static_argnums=(0, 1))
    return float(np.mean([judge(config, phase, params, jax.random.key(seed))[1] for seed in seeds]))
