"""Results files of `clo-jax bench` as pictures."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from clo_jax.bench.ways import policy
from clo_jax.pictures import new_figure, save

Rows = Sequence[Mapping[str, Any]]


def draw_throughput(path: pathlib.Path, content: Mapping[str, Any], title: str) -> None:
    """Tokens/s by length at the smallest batch, by batch at the longest length where there are several, and device
    bytes of the cache."""
    rows = [row for row in content["rows"] if "attention" in row]
    batches, contexts = (sorted({row[key] for row in rows}) for key in ("batch", "context"))
    few, longest = [r for r in rows if r["batch"] == batches[0]], [r for r in rows if r["context"] == contexts[-1]]
    panels = [(few, "context", "value"), (few, "context", "device_kv_bytes")]
    if len(batches) > 1:
        panels.insert(1, (longest, "batch", "value"))
    figure = new_figure(4.5 * len(panels), 4.5)
    axes = figure.subplots(1, len(panels))
    for axis, (chosen, across, up) in zip(axes, panels, strict=True):
        _panel(axis, chosen, across, up)
        where = f"{contexts[-1]:,} tokens" if across == "batch" else f"batch {batches[0]}"
        axis.set_title(where, fontsize=9, loc="left")
    axes[0].legend(fontsize=7)
    save(figure, path, title)


def draw_memory(path: pathlib.Path, content: Mapping[str, Any], title: str) -> None:
    """Bytes of the cache by length, on the device above and in host memory below; a column for each batch."""
    batches = sorted({row["batch"] for row in content["rows"]})
    figure = new_figure(max(6.5, 4.5 * len(batches)), 8)
    axes = figure.subplots(2, len(batches), squeeze=False, sharey=True)
    for column, batch in enumerate(batches):
        rows = [row for row in content["rows"] if row["batch"] == batch]
        for axis, up in zip(axes[:, column], ("device_kv_bytes", "host_kv_bytes"), strict=True):
            _panel(axis, rows, "context", up)
            axis.set_title(f"batch {batch}", fontsize=9, loc="left")
    axes[0, 0].legend(fontsize=7)
    save(figure, path, title)


def _series(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by policy."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(policy(row), []).append(row)
    return found


def _panel(axis: Any, rows: Rows, across: str, up: str) -> None:
    """A line for each policy: bytes on a logarithmic scale, rates from 0."""
    series = _series(rows)
    scale = 1.0 if up == "value" else 2**-30
    for number, (name, own) in enumerate(series.items()):
        own = sorted((row for row in own if row[up]), key=lambda row: row[across])
        # Side by side, so that equal values do not hide each other.
        places = [row[across] * 1.03 ** (number - (len(series) - 1) / 2) for row in own]
        axis.plot(places, [row[up] * scale for row in own], marker="o", markersize=4, color=f"C{number}", label=name)
    values = sorted({row[across] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in values])
    axis.set_xlim(values[0] / 1.3, values[-1] * 1.3)
    axis.minorticks_off()
    axis.set_xlabel("tokens of context" if across == "context" else "sequences at once")
    if up == "value":
        axis.set_ylim(0, 1.08 * max(row[up] for row in rows))
        axis.set_ylabel("tokens/s")
    else:
        axis.set_yscale("log")
        axis.set_ylabel("GiB of KV cache " + ("on the device" if up == "device_kv_bytes" else "in host memory"))
