"""Settings of the policies that CLO is compared with: frozen dataclasses that check their values, one per system.

`sparsity` is the budget of each: the share of the context whose exact keys and values a decode step attends to. What
counts against it and what comes on top is said in the policy's own module (`clo_jax.policies`).
"""

import dataclasses
from typing import Any, ClassVar

from clo_jax.config import require


def _require_sparsity(value: float) -> None:
    require(0 < value <= 1, "sparsity", value, "a number in (0, 1]")


@dataclasses.dataclass(frozen=True)
class ExactConfig:
    """The true top-k of the exact scores: the upper bound of what selection can do (`policies.exact`)."""

    attention: ClassVar[str] = "exact"
    sparsity: float = 0.1

    def __post_init__(self) -> None:
        _require_sparsity(self.sparsity)


RivalConfig = ExactConfig
RIVALS: dict[str, type[RivalConfig]] = {kind.attention: kind for kind in (ExactConfig,)}


def rival_config(attention: str, given: Any = None) -> RivalConfig | None:
    """The settings of the policy that `attention` names: `given`, or its defaults; None for full attention and CLO.

    Raises:
      ValueError: settings of another policy.
    """
    kind = RIVALS.get(attention)
    if given is not None and (kind is None or not isinstance(given, kind)):
        wanted = "None" if kind is None else kind.__name__
        raise ValueError(f"rival: got {type(given).__name__} with attention {attention}, wanted {wanted}")
    return kind() if given is None and kind is not None else given
