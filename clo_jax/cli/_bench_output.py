"""What the commands of `clo-jax bench` leave: results files, notes of what did not fit, titles of pictures."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from clo_jax.cli import _console


def kept(path: pathlib.Path | None, what: str, arguments: Mapping[str, Any], rows: Sequence[Any]) -> dict[str, Any]:
    """The content of a results file, written where there is one."""
    from clo_jax.bench import report

    return report.make(what, arguments, rows) if path is None else report.write(path, what, arguments, rows)


def skipped(reasons: Mapping[str, str]) -> None:
    """Notes what did not fit the memory."""
    for name, why in reasons.items():
        _console.note(f"{name}: left out: {why}")


def title(what: str, content: Mapping[str, Any]) -> str:
    """Of a picture: model, what is synthetic, machine."""
    args, machine = content["args"], content["hardware"]
    where = ", ".join(machine.get("gpus", ())) or machine["cpu"]
    labels = [f"{key} {args[key]}" for key in ("weights", "fill", "hits") if key in args]
    return ", ".join([what, args["model"], args["dtype"], *labels, where])


def written(*paths: pathlib.Path | None) -> None:
    """Notes each file."""
    for path in paths:
        if path is not None:
            _console.note(f"{path}: written")
