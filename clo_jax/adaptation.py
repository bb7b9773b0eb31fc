"""A plan that follows the workload: what requests say of the heads, and when that is reason for another plan.

Another plan means another layout and programs that compile anew, so that it is made between requests, and only when it
would move enough heads.
"""

import dataclasses
from typing import Any

import numpy as np

from clo_jax.cache.planner import Heads, Plan
from clo_jax.policies.tracking import HeadStatistics

_MEMORY = 256  # steps after which what was believed before counts half
_FEWEST = 2  # heads that another plan must move, and
_SHARE = 0.05  # as a share of all heads


@dataclasses.dataclass(frozen=True)
class Revision:
    """How a plan came to be: `number` of revisions (0: as calibrated); of the last of them: heads that became resident
    and heads that left, ((layer, head), ...), and the mean change of similarity since the plan before."""

    number: int = 0
    became_resident: tuple[tuple[int, int], ...] = ()
    left: tuple[tuple[int, int], ...] = ()
    similarity_change: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Seen:
    """Similarity and hit rates of a model's heads: those of the calibration, moved towards what requests show."""

    def __init__(self, heads: Heads) -> None:
        self.similarity = np.array(heads.similarity, np.float64)
        self.hit_rate = None if heads.hit_rate is None else np.array(heads.hit_rate, np.float64)

    def add(self, found: HeadStatistics) -> None:
        """Takes a request's statistics; each head's weight grows with the steps that it was seen in."""
        weight = (found.steps / (found.steps + _MEMORY))[:, None]
        self.similarity += weight * (found.similarity - self.similarity)
        if self.hit_rate is not None:
            weight = found.lookups / (found.lookups + _MEMORY)
            rate = found.hits / np.maximum(found.lookups, 1)
            self.hit_rate += weight * (rate - self.hit_rate)

    def heads(self, heads: Heads) -> Heads:
        """The same heads with what is believed now."""
        return dataclasses.replace(heads, similarity=self.similarity.copy(), hit_rate=self.hit_rate)


def revised(
    plan: Plan, other: Plan, revision: Revision, before: np.ndarray, now: np.ndarray
) -> tuple[Plan, Revision] | None:
    """The other plan, when it moves enough heads to be worth it.

    Args:
      plan, revision: in use. other: what follows from what is believed now.
      before, now: similarities [L, K] that the two were made with.
    """
    resident, wanted = plan.is_resident(), other.is_resident()
    if int((resident != wanted).sum()) < max(_FEWEST, _SHARE * resident.size):
        return None
    change = float(np.abs(now - before).mean())
    return other, Revision(revision.number + 1, _places(wanted & ~resident), _places(resident & ~wanted), change)


def _places(which: np.ndarray) -> tuple[tuple[int, int], ...]:
    return tuple((int(layer), int(head)) for layer, head in np.argwhere(which))
