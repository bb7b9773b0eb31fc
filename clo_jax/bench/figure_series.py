"""What the figures of the docs show, from the content of results files: nothing but what their rows say.

Each function takes a file's content and raises ValueError when rows are not there that its figure wants.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from clo_jax.bench import ablation_speed, timeline
from clo_jax.bench.decode import WEIGHTS_ONLY
from clo_jax.bench.headline import CLO, EARLY, FP8, FULL, INT8, INT8_EARLY, ON_DEVICE
from clo_jax.bench.ways import policy
from clo_jax.transfer.choice import GPU_BACKENDS

Content = Mapping[str, Any]
Lines = dict[str, list[tuple[float, float]]]  # by name: points from left to right

THROUGHPUT = (FULL, CLO, INT8, FP8, EARLY, INT8_EARLY)  # all but the first two where a file has them
COPIES, OTHER, GAPS = "copies", "other kernels", "gaps"
# Rows of a timeline that are parts of a layer, and what they are called in the figure. They add up to its time.
PARTS = {
    "attend": "attend", "prefetch": "prefetch", "offload": "offload", "matrix products": "matrix products",
    "norms": OTHER, COPIES: OTHER, timeline.XLA: OTHER, GAPS: GAPS,
}  # fmt: skip
_BACKENDS = "|".join((*GPU_BACKENDS, "host"))
_BACKEND = re.compile(rf"((?:{_BACKENDS})(?:, resident|, in line)?)(?:, (\d+) (threads|blocks))?[:,]")
_TOKENS = re.compile(r"\b(\d+)K tokens")


class Panel(NamedTuple):
    """Lines and what they have in common."""

    where: str
    lines: Lines


class Bandwidth(NamedTuple):
    """GB/s. At the longest length, in tokens of context, 0 where rows do not say it: `by_threads` of backends that copy
    by threads of the CPU, `without` of those that need none. `by_length` of each that has several lengths. `copy`: a
    contiguous copy."""

    length: int
    by_threads: Lines
    without: dict[str, float]
    by_length: Lines
    copy: float


class Part(NamedTuple):
    """A row of the ablation. Rows a token: `selected` by heads that missed, which is what whole sets would move, and
    `moved`, the difference to what was there. hit_rate: of head lookups, 0 to 1."""

    selected: float
    moved: float
    hit_rate: float


class Speed(NamedTuple):
    """The ablation in time, ms a step: by part and sets; `controls` by name."""

    parts: dict[str, dict[str, float]]
    controls: dict[str, float]


def by_context(content: Content) -> Panel:
    """Tokens/s of single sequences by context."""
    rows = [row for row in _of_policies(content) if row["batch"] == 1]
    return Panel("batch 1", _throughput(rows, "context", (FULL, CLO)))


def by_batch(content: Content, wanted: Sequence[str] = (FULL, CLO)) -> Panel:
    """Tokens/s of all sequences by batch, at the longest context. `wanted`: policies that must be there."""
    rows = _of_policies(content)
    longest = max((row["context"] for row in rows), default=0)
    rows = [row for row in rows if row["context"] == longest]
    return Panel(f"{longest:,} tokens", _throughput(rows, "batch", wanted))


def by_batch_early(content: Content) -> Panel:
    """`by_batch`, of rows of a byte and queries guessed from the layer's input alone."""
    panel = by_batch(content, (INT8_EARLY,))
    return Panel(panel.where, {INT8_EARLY: panel.lines[INT8_EARLY]})


def device_bytes(content: Content) -> Panel:
    """Bytes of the cache on the device by context, at the smallest batch."""
    rows = _of_policies(content)
    least = min((row["batch"] for row in rows), default=1)
    lines = _lines([row for row in rows if row["batch"] == least], "context", "device_kv_bytes")
    _require(lines, (FULL, CLO))
    return Panel(f"batch {least}", lines)


def layer_parts(content: Content) -> dict[str, dict[str, float]]:
    """Microseconds of a layer by policy and part, as `PARTS` calls them. Raises ValueError also where they do not add
    up to the layer."""
    found: dict[str, dict[str, float]] = {}
    whole: dict[str, float] = {}
    for row in content["rows"]:
        name, _, part = row["name"].partition(": ")
        if part == "all":
            whole[name] = row["value"]
        elif part in PARTS:
            of = found.setdefault(name, dict.fromkeys(PARTS.values(), 0.0))
            of[PARTS[part]] += row["value"]
    wanted = (WEIGHTS_ONLY, FULL, CLO, ON_DEVICE)
    _require(whole, wanted)
    for name, time in whole.items():
        if abs(sum(found.get(name, {}).values()) - time) > 1e-3 * time:
            raise ValueError(f"{name}: got parts of {found.get(name)} us, wanted the {time:.1f} us of all")
    return {name: found[name] for name in dict.fromkeys((*wanted, *found))}


def bandwidth(content: Content) -> Bandwidth:
    """Scattered rows by each transfer backend. A row's length is its `context` or in its name ("128K tokens"), else
    that of the row before, as in "the same rows"."""
    measured: dict[int, dict[tuple[str, int], float]] = {}
    titles: dict[tuple[str, int], str] = {}
    length, copy = 0, 0.0
    for row in content["rows"]:
        match = _BACKEND.match(row["name"])
        if not match or row["unit"] != "GB/s" or "control" not in row:
            continue
        said = _TOKENS.search(row["name"])
        length = row.get("context", int(said[1]) * 1024 if said else length)
        name, count, kind = match.groups()
        which = (name, int(count) if kind == "threads" else 0)
        titles[which] = f"{name}, {count} {kind}" if kind else name
        measured.setdefault(length, {})[which] = row["value"]
        copy = max(copy, row["control"])
    if not any(count for rates in measured.values() for _, count in rates):
        raise ValueError("got no rows of a transfer backend with threads in GB/s, wanted at least one with its control")
    threads: Lines = {}
    length = max(measured)
    longest = measured[length]
    for (name, count), rate in sorted(longest.items()):
        if count:
            threads.setdefault(name, []).append((count, rate))
    lengths = {
        titles[which]: [(n, rates[which]) for n, rates in sorted(measured.items()) if which in rates]
        for which in titles
    }  # fmt: skip
    return Bandwidth(
        length, threads, {titles[which]: rate for which, rate in longest.items() if not which[1]},
        {title: points for title, points in lengths.items() if len(points) > 1}, copy,
    )  # fmt: skip


def ablation(content: Content) -> dict[str, Part]:
    """The paper's parts one by one: those without importance first, then in the order of the file."""
    rows = {row["name"]: row for row in content["rows"]}
    prefix = "hit rate, "
    names = [name.removeprefix(prefix) for name in rows if name.startswith(prefix)]
    _require(names, ("uniform", "+T", "+T +G", "+T +G +P"))
    found = {}
    for name in sorted(names, key=lambda name: not name.startswith("uniform")):
        wanted = (f"{prefix}{name}", f"rows moved / rows selected, {name}", f"rows moved a token, {name}")
        _require(rows, wanted)
        hits, share, moved = (rows[one] for one in wanted)
        found[name] = Part(share["rows_selected"] / hits["decode_steps"], moved["value"], hits["value"])
    return found


def ablation_speed_steps(content: Content) -> Speed:
    """Steps of the parts, those that equal another under one name with it, and of the controls."""
    steps = {row["name"]: row for row in content["rows"] if row["name"].startswith("step, ")}
    found: dict[str, dict[str, float]] = {}
    names: dict[str, list[str]] = {}
    for row in steps.values():
        if "part" in row:
            found.setdefault(row["timed_as"], {})[row["sets"]] = row["value"]
            names[row["timed_as"]] = [*dict.fromkeys((*names.get(row["timed_as"], ()), row["part"]))]
    controls = (FULL, WEIGHTS_ONLY)
    _require(steps, [f"step, {control}" for control in controls])
    _require(steps, [f"step, {part}, {sets}" for part in ablation_speed.PARTS for sets in ablation_speed.SETS])
    return Speed(
        {" = ".join(names[part]): of for part, of in found.items()},
        {control: steps[f"step, {control}"]["value"] for control in controls},
    )  # fmt: skip


def _of_policies(content: Content) -> list[Mapping[str, Any]]:
    return [row for row in content["rows"] if "attention" in row]


def _throughput(rows: Sequence[Mapping[str, Any]], across: str, wanted: Sequence[str]) -> Lines:
    lines = _lines([row for row in rows if policy(row) in THROUGHPUT], across, "value")
    _require(lines, wanted)
    return {name: lines[name] for name in THROUGHPUT if name in lines}


def _lines(rows: Sequence[Mapping[str, Any]], across: str, up: str) -> Lines:
    """A line for each policy."""
    found: Lines = {}
    for row in sorted(rows, key=lambda row: row[across]):
        found.setdefault(policy(row), []).append((row[across], row[up]))
    return found


def _require(found: Collection[str], wanted: Sequence[str]) -> None:
    lacking = [name for name in wanted if name not in found]
    if lacking:
        raise ValueError(f"got no rows of {', '.join(map(repr, lacking))}, wanted them for the figure")
