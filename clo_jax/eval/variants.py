"""The ways of attending that an evaluation compares: what `--attention` and `--sparsity` name, as arguments of
`LLM.load`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from clo_jax.config import ATTENTIONS, CloConfig
from clo_jax.rivals import RIVALS

NAMES: tuple[str, ...] = ATTENTIONS  # every policy of LLM.load


@dataclasses.dataclass(frozen=True)
class Variant:
    """`attention` as named; `load`: what `LLM.load` gets beside the checkpoint and the sizes."""

    name: str
    attention: str
    sparsity: float | None
    load: Mapping[str, Any]


FULL = Variant("full", "full", None, {"attention": "full"})


def variants(
    names: Sequence[str], sparsities: Sequence[float], clo: CloConfig, options: Mapping[str, Any]
) -> list[Variant]:
    """Full attention, the control, then each other name at each sparsity.

    Args:
      names: of `NAMES`. Policies that CLO is compared with have their default settings but for the sparsity.
      clo: everything but the sparsity.
      options: further arguments of `LLM.load` for CLO.

    Raises:
      ValueError: an unknown name, no sparsity, or one that makes no sense.
    """
    found = [FULL]
    for name in dict.fromkeys(names):
        if name not in NAMES:
            raise ValueError(f"--attention: got {name!r}, wanted {', '.join(NAMES)}")
        if name == "full":
            continue
        if not sparsities:
            raise ValueError(f"--sparsity: got none, wanted at least one for {name}")
        for sparsity in dict.fromkeys(sparsities):
            if name in RIVALS:
                load = {"attention": name, "rival": RIVALS[name](sparsity=sparsity)}
            else:
                load = {"attention": name, "clo": dataclasses.replace(clo, sparsity=sparsity), **options}
            found.append(Variant(f"{name} {sparsity * 100:g} %", name, sparsity, load))
    return found
