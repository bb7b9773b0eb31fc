"""Which heads stay resident, planner `cost`: the set with the smallest predicted step time that fits a budget of device
memory.

The prediction. Layer l keeps the device busy for the time of a layer whose heads all hit, plus what reading resident
heads whole costs, plus the search for new sets of its missed heads. The rows of its missed heads travel while layer
l - 1 computes, or the share of it that follows the guess; what takes longer than that is waited for. A head misses with
its own probability and then moves its own share of k, so that the rows of a layer are a random number: the expected
wait is that of a normal variable with the same mean and variance.
"""

import dataclasses
import math

import numpy as np

from clo_jax.cache.plan import ResidentHeads


@dataclasses.dataclass(frozen=True, eq=False)
class StepModel:
    """What one decode step costs, in seconds and bytes; all heads of a model alike but for `miss` and `new_rows`.

    `miss` [L, K]: probability that a head's set is refreshed in a step, for one sequence. `new_rows` [L, K]: rows that
    a refresh then moves, as a share of k. `layer_s`: device time of a layer, all heads offloaded, all hitting.
    `resident_s`: what one resident head adds to it. `search_s`: what finding one head's new set adds, all sequences
    together. `set_s`: time of a whole set (k rows) of one head of one sequence on the link. `rest_s`: of a step
    outside of layers. `batch`: sequences. `cover`: share of a layer's time that follows the guess for the next one.
    """

    miss: np.ndarray
    new_rows: np.ndarray
    layer_s: float
    resident_s: float
    search_s: float
    set_s: float
    batch: int = 1
    rest_s: float = 0.0
    cover: float = 1.0

    def __post_init__(self) -> None:
        if np.ndim(self.miss) != 2 or np.shape(self.miss) != np.shape(self.new_rows):
            raise ValueError(
                f"new_rows: got shape {np.shape(self.new_rows)}, wanted that of miss, {np.shape(self.miss)} = [L, K]"
            )
        for name in ("miss", "new_rows"):
            values = np.asarray(getattr(self, name))
            if not np.all((values >= 0) & (values <= 1)):
                raise ValueError(f"{name}: got values outside [0, 1]")
        for name in ("layer_s", "resident_s", "search_s", "set_s", "rest_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: got {value}, wanted a number >= 0")
        if not 0 < self.cover <= 1:
            raise ValueError(f"cover: got {self.cover}, wanted a number in (0, 1]")
        if self.batch < 1:
            raise ValueError(f"batch: got {self.batch}, wanted a positive integer")


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
    """Expected times in seconds of one step, per layer [L]: device, link (rows of this layer's misses) and the wait for
    them. `hit_rate`: share of the offloaded heads' lookups that move nothing; 1 when none is offloaded."""

    device_s: np.ndarray
    link_s: np.ndarray
    wait_s: np.ndarray
    rest_s: float
    hit_rate: float

    @property
    def step_s(self) -> float:
        return float(self.device_s.sum() + self.wait_s.sum() + self.rest_s)


def predict(model: StepModel, resident: ResidentHeads) -> Prediction:
    """The expected step with these heads resident."""
    L, K = np.shape(model.miss)
    offloaded = np.ones((L, K), bool)
    for layer, heads in resident:
        offloaded[layer, list(heads)] = False
    device, mean, variance = (np.empty(L) for _ in range(3))
    for layer in range(L):
        out = offloaded[layer]
        device[layer], mean[layer], variance[layer] = _layer(model, layer, out, K - int(out.sum()))
    # Layer 0 has no layer before it: whatever it misses is waited for.
    cover = np.concatenate([[0.0], model.cover * device[:-1]])
    wait = _expected_excess(mean, np.sqrt(variance), cover)
    count = int(offloaded.sum())
    hit_rate = 1.0 - float(np.asarray(model.miss)[offloaded].mean()) if count else 1.0
    return Prediction(device, mean, wait, model.rest_s, hit_rate)


def cost_plan(model: StepModel, most_heads: int) -> ResidentHeads:
    """The resident heads with the smallest predicted step.

    Layer 0 is resident whole: no layer before it could guess its query. Within a layer, heads become resident in the
    order of the rows that they are expected to move (ties: the lower head); how many of each layer do is found by
    dynamic programming, exactly. Of plans that are equally fast, the one with fewer resident heads.

    Args:
      most_heads: resident heads that memory has room for, layer 0 included.

    Returns:
      ((layer, heads), ...) of every layer with resident heads.

    Raises:
      ValueError: no room for layer 0.
    """
    L, K = np.shape(model.miss)
    if most_heads < K:
        raise ValueError(f"most_heads: got {most_heads}, wanted at least {K}: layer 0 is resident whole")
    room = min(most_heads, L * K) - K
    moved = np.asarray(model.miss, np.float64) * np.asarray(model.new_rows, np.float64)
    order = np.argsort(-moved, axis=1, kind="stable")
    device, mean, variance = (np.empty((L, K + 1)) for _ in range(3))
    for layer in range(L):
        for number in range(K + 1):
            out = np.ones(K, bool)
            out[order[layer, :number]] = False
            device[layer, number], mean[layer, number], variance[layer, number] = _layer(model, layer, out, number)
    # best[used, n]: the fastest first layers with `used` resident heads beyond layer 0's and n in the last of them.
    best = np.full((room + 1, K + 1), np.inf)
    best[0, K] = device[0, K]
    choices = []
    for layer in range(1, L):
        wait = _expected_excess(
            mean[layer][:, None], np.sqrt(variance[layer])[:, None], model.cover * device[layer - 1]
        )
        new, came_from = np.full_like(best, np.inf), np.zeros(best.shape, np.int64)
        for number in range(min(K, room) + 1):
            total = best[: room + 1 - number] + wait[number][None, :]
            came_from[number:, number] = total.argmin(axis=1)
            new[number:, number] = total.min(axis=1) + device[layer, number]
        best = new
        choices.append(came_from)
    # The least number of heads among the fastest, up to rounding.
    fast = best.min() * (1 + 1e-12)
    used = int(np.nonzero(best.min(axis=1) <= fast)[0][0])
    number = int(best[used].argmin())
    numbers = [0] * L
    numbers[0] = K
    for layer in range(L - 1, 0, -1):
        numbers[layer] = number
        used, number = used - number, int(choices[layer - 1][used, number])
    return tuple(
        (layer, tuple(sorted(int(head) for head in order[layer, :number])))
        for layer, number in enumerate(numbers)
        if number
    )


def miss_probability(thresholds: np.ndarray, similarity: np.ndarray, spread: float, flush: int | None) -> np.ndarray:
    """How often heads miss, where it was not measured: cosines are taken to be normal about their mean.

    Args:
      thresholds: tau [L, K]. similarity: mean cosine to the label [L, K].
      spread: standard deviation. The paper's reuse margin stands for it: a head then counts as hard (Eq. 11) when it
        misses more often than one step in six.
      flush: steps after which every head is refreshed in any case; None: never.
    """
    if np.shape(thresholds) != np.shape(similarity):
        raise ValueError(f"similarity: got shape {np.shape(similarity)}, wanted {np.shape(thresholds)}")
    if not spread > 0:
        raise ValueError(f"spread: got {spread}, wanted a positive number")
    miss = _normal_cdf((np.asarray(thresholds, np.float64) - np.asarray(similarity, np.float64)) / spread)
    miss = np.where(np.asarray(thresholds) <= -1, 0.0, miss)  # every cosine reaches -1
    return miss if flush is None else 1 - (1 - miss) * (1 - 1 / flush)


def _layer(model: StepModel, layer: int, out: np.ndarray, resident: int) -> tuple[float, float, float]:
    """Device time of a layer; mean and variance of its time on the link. out [K]: offloaded heads."""
    miss = np.asarray(model.miss[layer], np.float64)[out]
    size = np.asarray(model.new_rows[layer], np.float64)[out] * model.set_s
    device = model.layer_s + resident * model.resident_s + model.search_s * float(miss.sum())
    mean = model.batch * float((miss * size).sum())
    variance = model.batch * float((miss * (1 - miss) * size**2).sum())
    return device, mean, variance


def _normal_cdf(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(np.asarray(z) / math.sqrt(2)))


def _expected_excess(mean: np.ndarray, deviation: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """E[max(X - cover, 0)] of a normal X; without deviation it is the excess of the mean."""
    over = mean - cover
    sure = deviation <= 0
    safe = np.where(sure, 1.0, deviation)
    z = over / safe
    expected = over * _normal_cdf(z) + safe * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return np.maximum(np.where(sure, over, expected), 0.0)
