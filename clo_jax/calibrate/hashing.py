"""Hash projections trained on a model's own queries and keys, per layer and KV head, and judged on held-out text.

W = unit columns times a length per column. The lengths matter to `sign` alone: they weigh the bits, which is how bits
go to the directions that need them. Both start from the untrained orthogonal projections.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clo_jax.cache.calibration import digest
from clo_jax.cache.calibration_parts import Choice, HashWeights
from clo_jax.cache.projections import projections
from clo_jax.calibrate import collect
from clo_jax.calibrate.collect import LayerSamples
from clo_jax.calibrate.mass import key_mean, selection_mass
from clo_jax.calibrate.objectives import Batch, hata_loss, lost_mass
from clo_jax.calibrate.text import Prompts
from clo_jax.config import ModelConfig, Retriever

SHARES = (0.1, 0.05, 0.02)  # of the context, trained for and judged at
_STEPS_PER_CALL = 25  # between two looks at Ctrl-C
_TEMPERATURE = {"sign": 0.15, "hata": 0.3}  # of the soft top-k; in the units of `objectives.soft_score`


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
    [P]."""

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
    """One optimiser step per key of `keys`; returns the mean loss of each."""

    def loss(parameters, batch):
        weights = _weights(parameters, settings)
        if settings.objective == "hata":
            each = jax.vmap(hata_loss)(weights, batch)
        else:
            lost = functools.partial(lost_mass, settings.retriever, shares=SHARES,
                                     temperature=_TEMPERATURE[settings.retriever])  # fmt: skip
            each = jax.vmap(lost)(weights, batch)
        return each.sum(), each.mean()  # heads are independent: the sum gives each its own gradient

    def step(carry, key):
        parameters, state = carry
        gradient, mean = jax.grad(loss, has_aux=True)(parameters, _draw(pool, settings, key))
        with jax.numpy_dtype_promotion("standard"):  # optax 0.2 mixes integers and floats
            updates, state = _optimiser(settings).update(gradient, state, parameters)
        return (optax.apply_updates(parameters, updates), state), mean

    (parameters, state), losses = jax.lax.scan(step, (parameters, state), keys)
    return parameters, state, losses


def untrained(settings: HashSettings, num_kv_heads: int, head_dim: int) -> np.ndarray:
    """What the codes are made with without training: float32 [K, D, R]."""
    one = projections(settings.retriever, head_dim, settings.hash_bits, settings.seed)
    return np.broadcast_to(one, (num_kv_heads, *one.shape))


def train_layer(
    samples: Sequence[LayerSamples], layer: int, settings: HashSettings, progress: Callable[[int], None] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Trains one layer's projections; the same arguments give the same result.

    Args:
      samples: the layer's queries and keys, one entry per prompt, each with the same number of positions.
      layer: its index; with the seed it decides what is drawn.
      progress: called with the number of steps done, every so often.

    Returns:
      weights float32 [K, D, R]; losses float32 [steps], means over heads.
    """
    pool = _pool(samples)
    K, D = pool.keys.shape[1], pool.keys.shape[3]
    kind = "hata" if settings.objective == "hata" else "sign"  # orthogonal but for HATA's own, which starts random
    start = jnp.asarray(projections(kind, D, settings.hash_bits, settings.seed))
    parameters = {
        "columns": jnp.broadcast_to(start, (K, *start.shape)),
        "lengths": jnp.zeros((K, settings.hash_bits), jnp.float32),
    }
    state, losses = _optimiser(settings).init(parameters), []
    keys = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), layer), settings.steps)
    for done in range(0, settings.steps, _STEPS_PER_CALL):
        parameters, state, some = _some_steps(settings, pool, parameters, state, keys[done : done + _STEPS_PER_CALL])
        losses.append(np.asarray(some))
        if progress is not None:
            progress(done + _STEPS_PER_CALL)
    weights = _weights(parameters, settings)
    weights = weights / jnp.sqrt(jnp.mean(weights**2, axis=(1, 2), keepdims=True) * D)  # columns of mean square 1
    return np.asarray(weights), np.concatenate(losses)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedHash:
    """Result of one `HashSettings`. `layers`: those that were trained; `weights` float32 [layers, K, D, R]; masses
    float64 [layers, shares, K] on held-out text, shares as in `SHARES`."""

    settings: HashSettings
    layers: tuple[int, ...]
    weights: np.ndarray
    mass: np.ndarray
    untrained_mass: np.ndarray
    losses: np.ndarray  # [layers, steps]

    def figures(self) -> dict:
        """Means over layers and heads by share, for provenance and reports."""
        return {
            "held_out_mass": by_share(self.mass),
            "untrained_mass": by_share(self.untrained_mass),
            "mass_per_layer": {str(layer): by_share(m[None]) for layer, m in zip(self.layers, self.mass, strict=True)},
        }

    def part(self, model: ModelConfig) -> HashWeights:
        """For the calibration folder; needs all layers."""
        if self.layers != tuple(range(model.num_layers)):
            raise ValueError(f"layers: got {self.layers}, wanted all {model.num_layers} of the model")
        return HashWeights(self.settings.retriever, self.weights, True, by_share(self.mass))


def by_share(mass: np.ndarray) -> dict[str, float]:
    """Mean of [layers, shares, K] by share, as JSON has it."""
    return {f"{share:g}": float(m) for share, m in zip(SHARES, mass.mean(axis=(0, 2)), strict=True)}


def train(
    config: ModelConfig, params, prompts: Prompts, settings: Sequence[HashSettings], *, queries_per_prompt: int = 128,
    layers: Sequence[int] | None = None, work: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[TrainedHash]:  # fmt: skip
    """Trains several kinds of code in one pass over the model.

    Args:
      config, params: the model.
      prompts: to train on and to judge by.
      settings: the kinds; their names must differ.
      queries_per_prompt: positions in the later half of each prompt whose queries are taken, drawn by the seed.
      layers: train only these (None: all).
      work: folder for finished layers: a run that was interrupted goes on from them, to the same result.
      progress: called with (layers done, layers in all, what is being done).

    Returns:
      one result per entry of `settings`.
    """
    wanted = tuple(range(config.num_layers)) if layers is None else tuple(sorted(layers))
    everything = [*prompts.train, *prompts.held_out]
    rng = np.random.default_rng(settings[0].seed)
    positions = [
        sorted(rng.choice(np.arange(len(p) // 2, len(p)), min(queries_per_prompt, len(p) // 2), replace=False).tolist())
        for p in everything
    ]
    if len({len(at) for at in positions}) != 1:
        raise ValueError(f"queries_per_prompt: got {queries_per_prompt}, wanted at most half of the shortest prompt")
    found: dict[str, list[dict[str, np.ndarray]]] = {one.name: [] for one in settings}
    for layer, samples in enumerate(collect.layers(config, params, everything, positions)):
        if layer > wanted[-1]:
            break
        if layer not in wanted:
            continue
        for one in settings:

            def tell(steps, layer=layer, one=one):
                if progress is not None:
                    progress(wanted.index(layer), len(wanted), f"layer {layer}, {one.name}, step {steps}")

            identity = digest([dataclasses.asdict(one), prompts.sha256(), layer, positions])
            found[one.name].append(_kept(work, identity, lambda: _layer(samples, layer, one, prompts, tell)))  # noqa: B023
    return [
        TrainedHash(one, wanted, *(np.stack([each[key] for each in found[one.name]]) for key in _KEYS))
        for one in settings
    ]


_KEYS = ("weights", "mass", "untrained_mass", "losses")


def _layer(samples, layer, settings, prompts, tell) -> dict[str, np.ndarray]:
    weights, losses = train_layer(samples[: len(prompts.train)], layer, settings, tell)
    K, D = weights.shape[:2]

    def judge(weights):
        each = [
            selection_mass(one, jnp.asarray(weights), settings.retriever, SHARES).mean(axis=2)
            for one in samples[len(prompts.train) :]
        ]
        return np.mean(each, axis=0)

    masses = judge(weights), judge(untrained(settings, K, D))
    return dict(zip(_KEYS, (weights, *masses, losses), strict=True))


def _kept(work: str | Path | None, identity: str, make: Callable[[], dict]) -> dict[str, np.ndarray]:
    """What `make` makes, from the work folder when an earlier run left it there."""
    if work is None:
        return make()
    path = Path(work) / f"hash-{identity[:24]}.npz"
    if path.exists():
        with np.load(path) as stored:
            return {key: stored[key] for key in _KEYS}
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, **made)
    partial.replace(path)
    return made


def choose(trained: Sequence[TrainedHash], share: float = 0.1) -> Choice:
    """The retriever with the higher held-out mass at equal bytes a token (both keep R bits and a factor per key), at
    the largest number of bits that both were trained at, or else the best of all.

    Raises:
      ValueError: nothing to choose from.
    """
    if not trained:
        raise ValueError("trained: got nothing, wanted at least one result")
    kinds = {(one.settings.retriever, one.settings.hash_bits): one for one in trained}
    both = [bits for kind, bits in kinds if kind == "sign" and ("hata", bits) in kinds]
    bits = max(both, default=max(bits for _, bits in kinds))
    column = SHARES.index(share)
    compared = {kind: float(one.mass[:, column].mean()) for (kind, b), one in kinds.items() if b == bits}
    best = max(compared, key=compared.__getitem__)
    figures = ", ".join(f"{kind} {mass:.4f}" for kind, mass in sorted(compared.items()))
    return Choice(best, bits, f"held-out attention mass at {bits} bits and {share:.0%} of the tokens: {figures}")
