"""Results files: every claimed figure is a row of `clo_jax/bench/results/<machine>-<what>.json`, written by the command
that measured it. One schema for all of them; `met` is computed here, never typed."""

import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clo_jax.versions import versions

SCHEMA_VERSION = 1
RESULTS = pathlib.Path(__file__).parent / "results"
_GOAL = re.compile(r"^(<=|>=|<|>|==) ?([-+\d.eE]+)(?: (.+))?$")
_REQUIRED = {
    "schema_version": int, "what": str, "command": str, "commit": str, "timestamp": str,
    "hardware": dict, "versions": dict, "args": dict, "rows": list,
}  # fmt: skip
# What a row of `clo-jax bench` holds beside name, value and unit when it is a policy's (docs/benchmarks.md says what
# each field is). Fields that may be null: where nothing moves, or the platform does not tell.
_CACHE = {"attention": str, "context": int, "batch": int, "device_kv_bytes": int, "host_kv_bytes": int}
_RUN = _CACHE | {"model": str, "weights": str, "repeats": int, "ttft_ms": float}
FIELDS = {
    "bench decode": _RUN | {
        "fill": str, "hits": str, "output_tokens": int, "output_throughput": float, "tpot_ms": float,
        "step_ms": float, "p50_step_ms": float, "p90_step_ms": float, "p99_step_ms": float, "layer_us": dict,
        "ratio_to_weights_only": float, "ratio_to_full": float, "hit_rate": float, "new_rows": float,
        "rows_moved_per_step": float, "link_bytes_per_step": float, "link_gb_per_s": float, "overlap_ratio": float,
        "wait_ms_per_step": float, "cpu_cores_busy": float, "kernel_launches_per_step": float,
    },
    "bench prefill": _RUN | {
        "input_tokens": int, "input_throughput": float, "p50_ttft_ms": float, "p90_ttft_ms": float,
        "p99_ttft_ms": float, "cpu_cores_busy": float,
    },
    "bench memory": _CACHE | {"device_kv_parts": dict},
}  # fmt: skip
_MAY_BE_NULL = frozenset({
    "ttft_ms", "ratio_to_weights_only", "ratio_to_full", "hit_rate", "new_rows", "overlap_ratio",
    "kernel_launches_per_step",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure. `goal` without a unit (">= 0.90") speaks of value / control, with one ("<= 18 us") of the value."""

    name: str
    value: float
    unit: str
    control_name: str | None = None
    control: float | None = None
    goal: str | None = None
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"name": self.name, "value": self.value, "unit": self.unit}
        if self.control is not None:
            row |= {"control_name": self.control_name, "control": self.control, "ratio": self.value / self.control}
        if self.goal is not None:
            row |= {"goal": self.goal, "met": meets(self.goal, self.value, self.unit, row.get("ratio"))}
        return row | dict(self.more)


def meets(goal: str, value: float, unit: str, ratio: float | None) -> bool:
    """Whether a figure reaches its goal.

    Raises:
      ValueError: a goal that cannot be read, in another unit than the value's, or of a ratio that is not there.
    """
    match = _GOAL.match(goal)
    if not match:
        raise ValueError(f"goal: got {goal!r}, wanted a comparison such as '>= 0.90' or '<= 18 us'")
    sign, bound, goal_unit = match[1], float(match[2]), match[3]
    if goal_unit is not None and goal_unit != unit:
        raise ValueError(f"goal: got unit {goal_unit!r}, wanted {unit!r}")
    figure = value if goal_unit is not None else ratio
    if figure is None:
        raise ValueError(f"goal: {goal!r} speaks of a ratio, but the row has no control")
    return {"<=": figure <= bound, ">=": figure >= bound, "<": figure < bound, ">": figure > bound,
            "==": figure == bound}[sign]  # fmt: skip


def hardware() -> dict[str, Any]:
    """This machine, as far as the system tells."""
    model = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30, 1)}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        found["gpus"] = [line.strip() for line in listed.splitlines()]
    return found


def commit() -> str:
    """The commit of the source tree, with -dirty when it has changes; what CLO_JAX_COMMIT says, for a tree that was
    copied without its history; "unknown" where nothing tells."""
    if os.environ.get("CLO_JAX_COMMIT"):
        return os.environ["CLO_JAX_COMMIT"]
    root = pathlib.Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _kept(value: Any) -> Any:
    """Arguments as they are kept: of a path from the root, at any depth, the last part and the folder it is in."""
    if isinstance(value, Mapping):
        return {name: _kept(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_kept(one) for one in value]
    return "/".join(pathlib.PurePath(value).parts[-2:]) if isinstance(value, str) and value.startswith("/") else value


def command(arguments: Sequence[str]) -> str:
    """A command line as it is kept: of every path only the last part, which is all that a reader elsewhere can use."""

    def shown(argument: str) -> str:
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        return option + equals + (pathlib.PurePath(value).name if "/" in value else value)

    return " ".join(shown(argument) for argument in arguments)


def make(what: str, args: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """What a results file holds.

    Raises:
      ValueError: see `validate`.
    """
    made = {
        "schema_version": SCHEMA_VERSION,
        "what": what,
        "command": command([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "versions": versions(),
        "args": _kept(args),
        "rows": [row.to_dict() for row in rows],
    }
    validate(made)
    return made


def write(path: pathlib.Path, what: str, args: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Writes a results file and returns its content."""
    made = make(what, args, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")
    return made


def validate(content: Mapping[str, Any]) -> None:
    """Raises ValueError unless `content` is a results file whose ratios and verdicts follow from its figures, with all
    `FIELDS` in its rows of policies."""
    for key, kind in _REQUIRED.items():
        if not isinstance(content.get(key), kind):
            raise ValueError(f"{key}: got {content.get(key)!r}, wanted {kind.__name__}")
    if content["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version: got {content['schema_version']}, wanted {SCHEMA_VERSION}")
    if not content["rows"]:
        raise ValueError("rows: got none, wanted at least one")
    for row in content["rows"]:
        name = row.get("name")
        if not isinstance(name, str) or not isinstance(row.get("value"), (int, float)) or "unit" not in row:
            raise ValueError(f"rows: got {row!r}, wanted name, value and unit")
        if "control" in row and abs(row["ratio"] * row["control"] - row["value"]) > 1e-6 * abs(row["value"]):
            raise ValueError(f"row {name!r}: ratio {row['ratio']} is not value / control")
        if "goal" in row and row["met"] != meets(row["goal"], row["value"], row["unit"], row.get("ratio")):
            raise ValueError(f"row {name!r}: met {row['met']} does not follow from its figures")
        if "attention" in row:
            _require_fields(row, FIELDS.get(content["what"], {}))


def _require_fields(row: Mapping[str, Any], wanted: Mapping[str, type]) -> None:
    for field, kind in wanted.items():
        value = row.get(field)
        good = isinstance(value, (int, float) if kind is float else kind) or (value is None and field in _MAY_BE_NULL)
        if field not in row or not good:
            raise ValueError(f"row {row['name']!r}: {field}: got {value!r}, wanted {kind.__name__}")


def markdown(content: Mapping[str, Any]) -> str:
    """The rows as a Markdown table: name, value, control, ratio, goal."""
    lines = ["| what | value | control | ratio | goal |", "|---|---|---|---|---|"]
    for row in content["rows"]:
        control = f"{row['control']:.4g} ({row['control_name']})" if "control" in row else ""
        ratio = f"{row['ratio']:.3f}" if "ratio" in row else ""
        goal = f"{row['goal']} ({'met' if row['met'] else 'missed'})" if "goal" in row else ""
        lines.append(f"| {row['name']} | {row['value']:.4g} {row['unit']} | {control} | {ratio} | {goal} |")
    return "\n".join(lines)
