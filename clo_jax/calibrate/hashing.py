"""Trained hash projections of every layer, judged on held-out text, and which kind of code is the better one."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from clo_jax.cache.calibration import digest
from clo_jax.cache.calibration_parts import Choice, HashWeights
from clo_jax.calibrate import collect
from clo_jax.calibrate.hash_training import SHARES, HashSettings, train_layers, untrained
from clo_jax.calibrate.mass import selection_mass
from clo_jax.calibrate.text import Prompts
from clo_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedHash:
    """Result of one `HashSettings`. `layers`: those that were trained; `weights` float32 [layers, K, D, R], of each
    head the better ones on held-out text (`better_of`); masses float64 [layers, shares, K] there, shares as in
    `SHARES`."""

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
            "heads_that_gained": float(self.gained.mean()),
            "mass_per_layer": {str(layer): by_share(m[None]) for layer, m in zip(self.layers, self.mass, strict=True)},
        }

    def part(self, model: ModelConfig) -> HashWeights:
        """For the calibration folder; needs all layers."""
        if self.layers != tuple(range(model.num_layers)):
            raise ValueError(f"layers: got {self.layers}, wanted all {model.num_layers} of the model")
        return HashWeights(self.settings.retriever, self.weights, bool(self.gained.any()), by_share(self.mass))

    @property
    def gained(self) -> np.ndarray:
        """Which heads have trained weights: bool [layers, K]."""
        return self.mass[:, 0] > self.untrained_mass[:, 0]


def by_share(mass: np.ndarray) -> dict[str, float]:
    """Mean of [layers, shares, K] by share, as JSON has it."""
    return {f"{share:g}": float(m) for share, m in zip(SHARES, mass.mean(axis=(0, 2)), strict=True)}


def train(
    config: ModelConfig, params, prompts: Prompts, settings: Sequence[HashSettings], *, queries_per_prompt: int = 128,
    layers: Sequence[int] | None = None, layers_at_once: int = 1, work: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[TrainedHash]:  # fmt: skip
    """Trains several kinds of code in one pass over the model.

    Args:
      config, params: the model.
      prompts: to train on and to judge by.
      settings: the kinds; their names must differ.
      queries_per_prompt: positions in the later half of each prompt whose queries are taken, drawn by the seed.
      layers: train only these (None: all).
      layers_at_once: how many are trained side by side. A GPU is then kept busy; memory grows with it.
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
    group: list[tuple[int, list[collect.LayerSamples]]] = []
    for layer, samples in enumerate(collect.layers(config, params, everything, positions)):
        if layer > wanted[-1]:
            break
        if layer not in wanted:
            continue
        group.append((layer, samples))
        if len(group) < layers_at_once and layer != wanted[-1]:
            continue
        done, at = wanted.index(group[0][0]), _span(group)
        for one in settings:

            def tell(steps, one=one, done=done, at=at):
                if progress is not None:
                    progress(done, len(wanted), f"{at}, {one.name}, step {steps}")

            identities = [digest([dataclasses.asdict(one), prompts.sha256(), each, positions]) for each, _ in group]
            found[one.name] += _kept(work, identities, lambda: _layers(group, one, prompts, tell))  # noqa: B023
        group = []
    return [
        TrainedHash(one, wanted, *(np.stack([each[key] for each in found[one.name]]) for key in _KEYS))
        for one in settings
    ]


_KEYS = ("weights", "mass", "untrained_mass", "losses")


def _span(group: Sequence[tuple[int, list]]) -> str:
    first, last = group[0][0], group[-1][0]
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _layers(group, settings: HashSettings, prompts: Prompts, tell) -> list[dict[str, np.ndarray]]:
    """Trains a group of layers and judges each."""
    number, made = len(prompts.train), []
    trained = train_layers([samples[:number] for _, samples in group], [layer for layer, _ in group], settings, tell)
    for (_, samples), weights, losses in zip(group, *trained, strict=True):

        def judge(weights, held_out=samples[number:]):
            each = [
                selection_mass(one, jnp.asarray(weights), settings.retriever, SHARES).mean(axis=2) for one in held_out
            ]
            return np.mean(each, axis=0)

        plain = untrained(settings, *weights.shape[:2])
        found = better_of((weights, judge(weights)), (plain, judge(plain)))
        made.append(dict(zip(_KEYS, (*found, losses), strict=True)))
    return made


def better_of(
    trained: tuple[np.ndarray, np.ndarray], plain: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights [K, D, R] and masses [shares, K] of training and of none -> each head's weights with the larger mass at
    the first share, their masses, and those of no training. Keys that fill all directions alike leave training nothing
    to gain, and then it only loses what it learnt by heart."""
    gained = trained[1][0] > plain[1][0]
    return np.where(gained[:, None, None], trained[0], plain[0]), np.where(gained, trained[1], plain[1]), plain[1]


def _kept(
    work: str | Path | None, identities: Sequence[str], make: Callable[[], list[dict]]
) -> list[dict[str, np.ndarray]]:  # fmt: skip
    """What `make` makes, one entry per identity; from the work folder when an earlier run left all of it there."""
    if work is None:
        return make()
    paths = [Path(work) / f"hash-{identity[:24]}.npz" for identity in identities]
    if all(path.exists() for path in paths):
        return [_stored(path) for path in paths]
    made = make()
    Path(work).mkdir(parents=True, exist_ok=True)
    for path, one in zip(paths, made, strict=True):
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez(file, **one)
        partial.replace(path)
    return made


def _stored(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return {key: stored[key] for key in _KEYS}


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
