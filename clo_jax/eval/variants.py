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


def varied(ways: Sequence[Variant], changes: Sequence[str]) -> list[Variant]:
    """The ways, and CLO once more at each of its sparsities for each of `changes`: settings that are not as in the
    others, as in "retain=1,refresh=whole".

    Raises:
      ValueError: a change that is none of CLO's settings, or is of no use without CLO.
    """
    found = list(ways)
    for change in changes:
        settings = dict(_setting(change, part) for part in change.split(","))
        before = len(found)
        for way in ways:
            if way.attention == "clo":
                load = {**way.load, "clo": dataclasses.replace(way.load["clo"], **settings)}
                found.append(Variant(f"{way.name}, {change}", "clo", way.sparsity, load))
        if len(found) == before:
            raise ValueError(f"--vary: got {change!r} without clo in --attention, wanted it there")
    return found


def _setting(change: str, part: str) -> tuple[str, Any]:
    name, _, text = part.partition("=")
    defaults = {field.name: field.default for field in dataclasses.fields(CloConfig)}
    known = [field for field, default in defaults.items() if default is not None and field != "sparsity"]
    if name not in known:
        raise ValueError(f"--vary: got {change!r}, wanted SETTING=VALUE,... of {', '.join(known)}")
    kind = type(defaults[name])
    try:
        return name, {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"--vary: got {text!r} for {name}, wanted a value such as {defaults[name]}") from None
