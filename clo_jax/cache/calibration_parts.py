"""The parts of a calibration: what each holds, which shapes fit a model, and how it is stored as arrays and figures."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from clo_jax.config import ModelConfig, Retriever

Arrays = dict[str, np.ndarray]
Facts = dict[str, Any]


def _shape_problem(name: str, array: np.ndarray, *wanted: tuple[int, ...]) -> str | None:
    if array.shape in wanted:
        return None
    return f"{name}: got shape {array.shape}, wanted {' or '.join(map(str, wanted))}"


def _require(ok: bool, name: str, got: Any, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{name}: got {got}, wanted {wanted}")


class _Part:
    """Fields that are arrays are stored as tensors, the others as figures."""

    name: ClassVar[str]

    @property
    def part_name(self) -> str:
        return self.name

    def stored(self) -> tuple[Arrays, Facts]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        arrays = {key: value for key, value in values.items() if isinstance(value, np.ndarray)}
        return arrays, {key: value for key, value in values.items() if key not in arrays}

    @classmethod
    def from_stored(cls, arrays: Arrays, facts: Facts):
        return cls(**arrays, **facts)


@dataclasses.dataclass(frozen=True, eq=False)
class Importance(_Part):
    """Head importance in [0, 1]: `scores` float32 [L, H] (query heads) or [L, K] (KV heads). `source`: "gates",
    "duo-attention file" or "quick estimate"."""

    name: ClassVar[str] = "importance"
    scores: np.ndarray
    source: str

    def __post_init__(self) -> None:
        _require(self.scores.ndim == 2, "scores", f"shape {self.scores.shape}", "[L, H] or [L, K]")
        good = bool(np.all((self.scores >= 0) & (self.scores <= 1)))  # false for NaN, too
        _require(good, "scores", "values outside", "[0, 1]")

    def misfit(self, model: ModelConfig) -> str | None:
        L = model.num_layers
        return _shape_problem("scores", self.scores, (L, model.num_heads), (L, model.num_kv_heads))


@dataclasses.dataclass(frozen=True, eq=False)
class HashWeights(_Part):
    """Projections of one kind of code: `weights` float32 [L, K, D, R]. `trained`: False for untrained ones that are
    kept for comparison. `held_out_mass`: share of the exact selection's attention mass on held-out text, by share of
    tokens selected ("0.1": ...)."""

    name: ClassVar[str] = "hash"
    retriever: Retriever
    weights: np.ndarray
    trained: bool
    held_out_mass: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.retriever in ("hata", "sign"), "retriever", repr(self.retriever), "hata or sign")
        _require(self.weights.ndim == 4, "weights", f"shape {self.weights.shape}", "[L, K, D, R]")
        _require(self.weights.shape[3] % 32 == 0, "weights", f"{self.weights.shape[3]} bits", "a multiple of 32")
        _require(self.weights.dtype == np.float32, "weights", self.weights.dtype, "float32")
        _require(bool(np.isfinite(self.weights).all()), "weights", "values that are not finite", "finite ones")

    @property
    def hash_bits(self) -> int:
        return self.weights.shape[3]

    @property
    def part_name(self) -> str:
        return f"hash-{self.retriever}-{self.hash_bits}"

    def misfit(self, model: ModelConfig) -> str | None:
        wanted = (model.num_layers, model.num_kv_heads, model.head_dim, self.hash_bits)
        return _shape_problem("weights", self.weights, wanted)


@dataclasses.dataclass(frozen=True, eq=False)
class Choice(_Part):
    """The retriever that was better on held-out text at equal bytes a token, and the comparison that says so."""

    name: ClassVar[str] = "choice"
    retriever: Retriever
    hash_bits: int
    why: str

    def misfit(self, model: ModelConfig) -> str | None:
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class Similarity(_Part):
    """How alike a head's queries and selections are from step to step, float32 [L, K], means over steps and prompts.

    `adjacent`: cosine of the guessed queries of adjacent steps (importance-weighted over the group: what Eq. 11 takes);
    `to_label`: of a guess to the head's label; `guess`: of a guess to the exact query. `hit_rate`: share of steps that
    reuse the set. `overlap`: of the exact top-k sets of adjacent steps. `new_rows`: rows that a refresh moves on a
    miss, as a share of k. `guessed_mass`, `reused_mass`: attention mass, relative to the exact set's, of the set that
    the guess selects and of the set that is in the buffer. `settings`: threshold, sparsity, retain and the like.
    """

    name: ClassVar[str] = "similarity"
    adjacent: np.ndarray
    to_label: np.ndarray
    guess: np.ndarray
    hit_rate: np.ndarray
    overlap: np.ndarray
    new_rows: np.ndarray
    guessed_mass: np.ndarray
    reused_mass: np.ndarray
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def misfit(self, model: ModelConfig) -> str | None:
        wanted = (model.num_layers, model.num_kv_heads)
        problems = (_shape_problem(name, array, wanted) for name, array in self.stored()[0].items())
        return next((problem for problem in problems if problem), None)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace(_Part):
    """What happened at every step, for benches that replay it. P prompts, N steps.

    `hits` bool [P, N, L, K]; `new_rows` int32 [P, N, L, K]: rows moved (0 on a hit); `selected` int32 [P, N]: k;
    `lengths` int32 [P]: prompt tokens.
    """

    name: ClassVar[str] = "trace"
    hits: np.ndarray
    new_rows: np.ndarray
    selected: np.ndarray
    lengths: np.ndarray

    def __post_init__(self) -> None:
        wanted = {"new_rows": self.hits.shape, "selected": self.hits.shape[:2], "lengths": self.hits.shape[:1]}
        for name, shape in wanted.items():
            _require(getattr(self, name).shape == shape, name, f"shape {getattr(self, name).shape}", str(shape))

    def misfit(self, model: ModelConfig) -> str | None:
        return _shape_problem("hits", self.hits, (*self.hits.shape[:2], model.num_layers, model.num_kv_heads))


@dataclasses.dataclass(frozen=True, eq=False)
class Costs(_Part):
    """Measured on one machine. `layer_times`: (batch, context tokens, seconds of one decode layer whose heads all
    hit), ...; `link_bytes_per_s`: by backend; `device`: where; `device_bytes_per_s`: how fast its memory is read."""

    name: ClassVar[str] = "costs"
    layer_times: tuple[tuple[int, int, float], ...]
    link_bytes_per_s: Mapping[str, float]
    device: str
    device_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        rows = tuple((int(b), int(s), float(t)) for b, s, t in self.layer_times)
        rates = [*self.link_bytes_per_s.values(), 1.0 if self.device_bytes_per_s is None else self.device_bytes_per_s]
        good = all(t > 0 for *_, t in rows) and all(rate > 0 for rate in rates)
        _require(good, "costs", "a time or rate that is not positive", "positive ones")
        object.__setattr__(self, "layer_times", rows)

    def misfit(self, model: ModelConfig) -> str | None:
        return None


PARTS: Mapping[str, type[_Part]] = {
    part.name: part for part in (Importance, HashWeights, Choice, Similarity, Trace, Costs)
}
