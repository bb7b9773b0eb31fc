"""Results files of `clo-jax bench` as Markdown tables."""

from collections.abc import Mapping, Sequence
from typing import Any

Content = Mapping[str, Any]


def throughput(content: Content) -> str:
    """Tokens/s by context and system, of single sequences."""
    rows = [row for row in content["rows"] if "context" in row and row.get("batch", 1) == 1]
    contexts, systems = sorted({row["context"] for row in rows}), _systems(rows)
    by_name = {row["name"]: row["value"] for row in rows}
    lines = ["| context | " + " | ".join(systems) + " |", "|---" * (len(systems) + 1) + "|"]
    for context in contexts:
        values = (by_name.get(f"{system}, {context} tokens") for system in systems)
        lines.append(f"| {context:,} | " + " | ".join("" if v is None else f"{v:.1f}" for v in values) + " |")
    return "\n".join(lines)


def decode(content: Content) -> str:
    """A line for each measurement of `bench decode`."""
    head = (
        "what", "step ms: p50 / p90 / p99", "tokens/s", "x full", "x weights only", "hit rate", "rows / step",
        "link GB/s", "overlap", "cores", "KV on the device", "KV in host memory",
    )  # fmt: skip
    lines = []
    for row in content["rows"]:
        if "step_ms" not in row:
            continue
        steps = " / ".join(f"{row[f'p{p}_step_ms']:.3g}" for p in (50, 90, 99))
        cells = [row["name"], steps, f"{row['value']:.1f}"]
        cells += [_number(row.get(key), ".3f") for key in ("ratio_to_full", "ratio_to_weights_only")]
        cells += [_number(row.get("hit_rate"), ".2f"), _number(row.get("rows_moved_per_step"), ",.0f")]
        cells += [_number(row.get(key), ".2f") for key in ("link_gb_per_s", "overlap_ratio", "cpu_cores_busy")]
        cells += [_bytes(row.get(key)) for key in ("device_kv_bytes", "host_kv_bytes")]
        lines.append(cells)
    return _table(head, lines)


def prefill(content: Content) -> str:
    """A line for each measurement of `bench prefill`."""
    head = ("what", "TTFT ms: p50 / p90 / p99", "tokens/s", "control", "ratio", "cores")
    lines = []
    for row in content["rows"]:
        if "ttft_ms" not in row:
            continue
        times = " / ".join(f"{row[f'p{p}_ttft_ms']:.4g}" for p in (50, 90, 99))
        lines.append(
            [row["name"], times, f"{row['value']:.0f}", row["control_name"], f"{row['ratio']:.3f}",
             f"{row['cpu_cores_busy']:.2f}"]
        )  # fmt: skip
    return _table(head, lines)


def memory(content: Content) -> str:
    """A line for each policy, context and batch of `bench memory`."""
    head = ("what", "on the device", "of full attention", "in host memory", "largest parts on the device")
    lines = []
    for row in content["rows"]:
        parts = sorted(row["device_kv_parts"].items(), key=lambda part: -part[1])[:3]
        largest = ", ".join(f"{name} {_bytes(size)}" for name, size in parts)
        share = f"{row['ratio'] * 100:.1f} %"
        lines.append([row["name"], _bytes(row["value"]), share, _bytes(row["host_kv_bytes"]), largest])
    return _table(head, lines)


def _systems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["name"].split(",")[0] for row in rows))


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    made = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in made)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _bytes(value: float | None) -> str:
    return "" if value is None else f"{value / 2**30:.4g} GiB" if value >= 2**30 else f"{value / 2**20:.4g} MiB"
