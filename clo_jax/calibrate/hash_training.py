"""Hash projections trained on a model's own queries and keys, per layer and KV head.

W = unit columns times a length per column. The lengths matter to `sign` alone: they weigh the bits, which is how bits
go to the directions that need them. Both start from the untrained orthogonal projections.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clo_jax.cache.projections import projections
from clo_jax.calibrate.collect import LayerSamples
from clo_jax.calibrate.mass import key_mean
from clo_jax.calibrate.objectives import Batch, hata_loss, lost_mass
from clo_jax.config import ModelConfig, Retriever

SHARES = (0.1, 0.05, 0.02)  # of the context, trained for and judged at
_STEPS_PER_CALL = 25  # between two looks at Ctrl-C
_TEMPERATURE = {"sign": 0.15, "hata": 0.3}  # of the soft top-k; in the units of `objectives.soft_score`
_SCORES_AT_ONCE = 24  # arrays of the size of a step's scores, that training keeps for each head; a bound


@dataclasses.dataclass(frozen=True)
class HashSettings:
    """One kind of code and how it is trained. `objective`: "mass", or "hata" for HATA's own (with `hata` codes)."""

    retriever: Retriever
    hash_bits: int
    objective: Literal["mass", "hata"] = "mass"
    steps: int = 600
    queries: int = 32  # a step, of one prompt
    keys: int = 1024  # a step, drawn from the prompt
    learning_rate: float = 1e-2
    length_rate: float = 3e-2  # learning rate of the columns' lengths
    seed: int = 0

    def __post_init__(self) -> None:
        for ok, name, wanted in (
            (self.retriever in ("sign", "hata"), "retriever", "sign or hata"),
            (self.hash_bits > 0 and self.hash_bits % 32 == 0, "hash_bits", "a positive multiple of 32"),
            (self.objective == "mass" or (self.objective, self.retriever) == ("hata", "hata"), "objective",
             "mass, or hata with retriever hata"),
            (self.steps > 0 and self.steps % _STEPS_PER_CALL == 0, "steps", f"a multiple of {_STEPS_PER_CALL}, not 0"),
            (self.queries > 0, "queries", "a positive integer"),
            (self.keys > 0, "keys", "a positive integer"),
        ):  # fmt: skip
            if not ok:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wanted {wanted}")

    @property
    def name(self) -> str:
        return f"{self.retriever}-{self.hash_bits}" + ("" if self.objective == "mass" else f"-{self.objective}")


class _Pool(NamedTuple):
    """All prompts of a layer: queries [P, M, K, G, D], keys [P, K, N, D], positions [P, M], means [P, K, D], lengths
    [P]. Pools of several layers are stacked."""

    queries: jax.Array
    keys: jax.Array
    positions: jax.Array
    means: jax.Array
    lengths: jax.Array


def _pool(samples: Sequence[LayerSamples]) -> _Pool:
    K, _, D = samples[0].keys.shape
    longest = max(one.keys.shape[1] for one in samples)
    keys = jnp.stack([jnp.pad(one.keys, ((0, 0), (0, longest - one.keys.shape[1]), (0, 0))) for one in samples])
    lengths = jnp.array([one.length for one in samples], jnp.int32)
    means = jax.vmap(jax.vmap(key_mean, (0, None)))(keys, lengths)
    queries = jnp.stack([one.queries.reshape(-1, K, one.queries.shape[1] // K, D) for one in samples])
    return _Pool(queries, keys, jnp.stack([one.positions for one in samples]), means, lengths)


def _draw(pool: _Pool, settings: HashSettings, key: jax.Array) -> Batch:
    """A step's batch of every head (leading axis K): queries and keys of one prompt."""
    of_prompt, of_queries, of_keys = jax.random.split(key, 3)
    P, M = pool.positions.shape
    prompt = jax.random.randint(of_prompt, (), 0, P)
    chosen = jax.random.choice(of_queries, M, (min(settings.queries, M),), replace=False)
    tokens = jax.random.randint(of_keys, (settings.keys,), 0, pool.lengths[prompt])
    positions = pool.positions[prompt][chosen]
    # The first token is seen by every query: no query is without keys.
    tokens = tokens.at[0].set(0)
    seen = tokens[None] <= positions[:, None]
    K = pool.keys.shape[1]
    queries = pool.queries[prompt][chosen].transpose(1, 0, 2, 3)
    return Batch(queries, pool.keys[prompt][:, tokens], jnp.broadcast_to(seen, (K, *seen.shape)), pool.means[prompt])


def _weights(parameters: dict[str, jax.Array], settings: HashSettings) -> jax.Array:
    """[..., D, R]."""
    columns = parameters["columns"]
    if settings.objective == "hata":
        return columns
    unit = columns / jnp.linalg.norm(columns, axis=-2, keepdims=True)
    return unit * jnp.exp(parameters["lengths"])[..., None, :]


def _optimiser(settings: HashSettings) -> optax.GradientTransformation:
    def adam(rate: float) -> optax.GradientTransformation:
        return optax.adam(optax.cosine_decay_schedule(rate, settings.steps))

    rates = {"columns": adam(settings.learning_rate), "lengths": adam(settings.length_rate)}
    return optax.multi_transform(rates, {"columns": "columns", "lengths": "lengths"})


@functools.partial(jax.jit, static_argnums=0)
def _some_steps(settings: HashSettings, pool: _Pool, parameters, state, keys: jax.Array):
    """One optimiser step per row of `keys` [steps, layers]; returns the mean losses [steps, layers]."""

    def loss(parameters, batch):
        weights = _weights(parameters, settings)
        if settings.objective == "hata":
            one = hata_loss
        else:
            one = functools.partial(lost_mass, settings.retriever, shares=SHARES,
                                    temperature=_TEMPERATURE[settings.retriever])  # fmt: skip
        each = jax.vmap(jax.vmap(one))(weights, batch)
        return each.sum(), each.mean(axis=1)  # heads are independent: the sum gives each its own gradient

    def step(carry, keys):
        parameters, state = carry
        batch = jax.vmap(lambda pool, key: _draw(pool, settings, key))(pool, keys)
        gradient, mean = jax.grad(loss, has_aux=True)(parameters, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax 0.2 mixes integers and floats
            updates, state = _optimiser(settings).update(gradient, state, parameters)
        return (optax.apply_updates(parameters, updates), state), mean

    (parameters, state), losses = jax.lax.scan(step, (parameters, state), keys)
    return parameters, state, losses


def untrained(settings: HashSettings, num_kv_heads: int, head_dim: int) -> np.ndarray:
    """What the codes are made with without training: float32 [K, D, R]."""
    one = projections(settings.retriever, head_dim, settings.hash_bits, settings.seed)
    return np.broadcast_to(one, (num_kv_heads, *one.shape))


def train_layers(
    samples: Sequence[Sequence[LayerSamples]], layers: Sequence[int], settings: HashSettings,
    progress: Callable[[int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Trains projections of several layers side by side; the same arguments give the same result, and each layer's is
    that of training it alone, up to rounding.

    Args:
      samples: each layer's queries and keys, one entry per prompt, each with the same number of positions.
      layers: their indices; with the seed they decide what is drawn.
      progress: called with the number of steps done, every so often.

    Returns:
      weights float32 [layers, K, D, R]; losses float32 [layers, steps], means over heads.
    """
    pool = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(_pool(one) for one in samples))
    n, _, K, _, D = pool.keys.shape
    kind = "hata" if settings.objective == "hata" else "sign"  # orthogonal but for HATA's own, which starts random
    start = jnp.asarray(projections(kind, D, settings.hash_bits, settings.seed))
    parameters = {
        "columns": jnp.broadcast_to(start, (n, K, *start.shape)),
        "lengths": jnp.zeros((n, K, settings.hash_bits), jnp.float32),
    }
    state, losses = _optimiser(settings).init(parameters), []
    keys = jnp.stack(
        [
            jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), layer), settings.steps)
            for layer in layers
        ],
        axis=1,
    )
    with jax.default_matmul_precision("highest"):  # a GPU would round float32 to 10 bits, and signs would flip
        for done in range(0, settings.steps, _STEPS_PER_CALL):
            some = keys[done : done + _STEPS_PER_CALL]
            parameters, state, mean = _some_steps(settings, pool, parameters, state, some)
            losses.append(np.asarray(mean))
            if progress is not None:
                progress(done + _STEPS_PER_CALL)
    weights = _weights(parameters, settings)
    weights = weights / jnp.sqrt(jnp.mean(weights**2, axis=(2, 3), keepdims=True) * D)  # columns of mean square 1
    return np.asarray(weights), np.concatenate(losses).T


def bytes_of_a_layer(config: ModelConfig, lengths: Sequence[int], settings: Sequence[HashSettings]) -> int:
    """About what one layer takes while it is trained on prompts of these lengths: their keys twice, and a step."""
    K, G, D = config.num_kv_heads, config.group, config.head_dim
    keys = 4 * K * D * (sum(lengths) + len(lengths) * max(lengths)) * 2  # buckets are up to twice as long
    return keys + max(4 * K * G * one.queries * one.keys * _SCORES_AT_ONCE for one in settings)
