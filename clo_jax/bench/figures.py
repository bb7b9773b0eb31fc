"""The figures of the docs, drawn from the results files that are there.

    python -m clo_jax.bench.figures --results clo_jax/bench/results --out docs

A figure whose file is absent is skipped, by name. Drawing twice with one matplotlib gives the same bytes.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from clo_jax.bench import figure_series as series
from clo_jax.bench import report
from clo_jax.bench.ablation_speed import DELTA, UNIFORM, WHOLE
from clo_jax.pictures import new_figure, require_matplotlib

# Told apart by the colour-blind as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933")
# Over matplotlib's own settings, whatever the user's are.
STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.titlelocation": "left", "figure.titlesize": 8, "legend.fontsize": 7,
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "0.9", "grid.linewidth": 0.6, "lines.linewidth": 1.4, "lines.markersize": 4,
    "lines.marker": "o", "savefig.dpi": 100, "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
}  # fmt: skip
CONTROL = {"color": "0.45", "linestyle": ":", "marker": ""}
_SIDE = 1.03  # points of different lines beside each other, so that equal values do not hide each other
_GREY = "0.85"


@dataclasses.dataclass(frozen=True)
class Drawing:
    """`sources`: by file, what is shown of it. `draw` gets an empty figure and that, in this order."""

    sources: Mapping[str, Callable[[series.Content], Any]]
    draw: Callable[..., None]
    width: float
    height: float


def _throughput(figure: Any, contexts: series.Panel, batches: series.Panel, early: series.Panel) -> None:
    left, right = figure.subplots(1, 2)
    batches = series.Panel(batches.where, batches.lines | early.lines)
    names = [name for name in series.THROUGHPUT if name in {**contexts.lines, **batches.lines}]
    for axis, panel, label in ((left, contexts, "tokens of context"), (right, batches, "sequences at once")):
        _draw_lines(axis, panel.lines, names, label)
        axis.set_title(panel.where)
        axis.set_ylim(0, 1.1 * max(y for line in panel.lines.values() for _, y in line))
        axis.set_ylabel("tokens/s")
    handles = {line.get_label(): line for axis in (left, right) for line in axis.lines}
    figure.legend(handles=[handles[name] for name in names], loc="outside lower center", ncols=3)


def _breakdown(figure: Any, policies: Mapping[str, Mapping[str, float]]) -> None:
    axis = figure.subplots()
    names = [textwrap.fill(name, 22) for name in policies]
    before, most = [0.0] * len(policies), max(sum(parts.values()) for parts in policies.values())
    shown = list(dict.fromkeys(series.PARTS.values()))
    for number, part in enumerate(shown):
        widths = [parts[part] for parts in policies.values()]
        colour = _GREY if part == series.GAPS else f"C{number}"
        bars = axis.barh(names, widths, 0.62, left=before, color=colour, label=part)
        axis.bar_label(bars, [f"{w:.0f}" if w > 0.04 * most else "" for w in widths], label_type="center", fontsize=7)
        before = [left + width for left, width in zip(before, widths, strict=True)]
    axis.bar_label(bars, [f"{whole:.0f}" for whole in before], padding=3, weight="bold")
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.margins(x=0.08)
    axis.set_xlabel("µs of a layer")
    figure.legend(loc="outside lower center", ncols=len(shown))


def _bandwidth(figure: Any, found: series.Bandwidth) -> None:
    panels = [(found.by_threads, "threads of the CPU")]
    if found.by_length:
        panels.append((found.by_length, "tokens of context"))
    figure.set_figheight(figure.get_figheight() * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (lines, label) in zip(axes, panels, strict=True):
        _draw_lines(axis, lines, list(lines), label, side=1.0)
        if lines is found.by_threads:
            axis.set_title(f"{_count(found.length)} tokens of context" if found.length else "")
            for number, (name, rate) in enumerate(found.without.items(), len(lines)):
                axis.axhline(rate, color=f"C{number}", linestyle="--", marker="", label=f"{name} (no threads)")
        axis.axhline(found.copy, **CONTROL, label="contiguous copy")
        axis.set_ylim(0, 1.1 * found.copy)
        axis.set_ylabel("GB/s of scattered rows")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _memory(figure: Any, panel: series.Panel) -> None:
    axis = figure.subplots()
    lines = {name: [(x, y / 2**30) for x, y in line] for name, line in panel.lines.items()}
    _draw_lines(axis, lines, list(lines), "tokens of context")
    axis.set_title(panel.where)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel("GiB of KV cache on the device")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _ablation(figure: Any, parts: Mapping[str, series.Part]) -> None:
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names, at = list(parts), range(len(parts))
    moved, hits = [part.moved for part in parts.values()], [part.hit_rate for part in parts.values()]
    selected = [part.selected for part in parts.values()]
    bars = (
        left.barh([i - 0.2 for i in at], selected, 0.38, color=_GREY, label="whole sets of the heads that miss"),
        left.barh([i + 0.2 for i in at], moved, 0.38, color="C0", label="delta: what is not there yet (moved)"),
    )
    for drawn, values in zip(bars, (selected, moved), strict=True):
        left.bar_label(drawn, [f"{v:,.0f}" for v in values], padding=3, fontsize=7)
    left.set_xlabel("rows a token")
    left.set_yticks(at, [textwrap.fill(name, 16) for name in names])
    left.xaxis.set_major_formatter("{x:,.0f}")
    left.locator_params(axis="x", nbins=5)
    left.legend(loc="lower right")
    right.bar_label(right.barh(at, hits, 0.62, color="C1"), [f"{v:.2f}" for v in hits], padding=3, fontsize=7)
    right.set_xlabel("hit rate, share of head lookups")
    right.set_xlim(0, 1.1)
    left.invert_yaxis()
    for axis in (left, right):
        axis.grid(False, axis="y")
    left.margins(x=0.12)


def _ablation_speed(figure: Any, speed: series.Speed) -> None:
    axis = figure.subplots()
    base, most = speed.parts[UNIFORM][WHOLE], max(max(of.values()) for of in speed.parts.values())
    for number, (sets, colour) in enumerate(((WHOLE, _GREY), (DELTA, "C0"))):
        values = [of[sets] for of in speed.parts.values()]
        drawn = axis.barh([i + 0.4 * number - 0.2 for i in range(len(values))], values, 0.38, color=colour, label=sets)
        labels = [f"{v:.2f} ms" + (f" ({v / base - 1:+.0%})" if v != base else "") for v in values]
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # lines of the controls may be behind
        axis.bar_label(drawn, labels, padding=4, fontsize=7, bbox=white)
    for (name, ms), style in zip(speed.controls.items(), ("--", ":"), strict=True):
        axis.axvline(ms, color="0.45", linestyle=style, marker="", label=name)
    axis.set_yticks(range(len(speed.parts)), [textwrap.fill(name, 16) for name in speed.parts])
    axis.set_xlim(0, 1.25 * max(most, *speed.controls.values()))
    axis.set_xlabel("ms a step (in brackets: against the uniform threshold with whole sets)")
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))


DRAWINGS = {
    "throughput": Drawing(
        {
            "h200-growth.json": series.by_context, "h200-128k.json": series.by_batch,
            "h200-early.json": series.by_batch_early,
        },
        _throughput, 7.5, 3.8,
    ),
    "breakdown": Drawing({"h200-timeline.json": series.layer_parts}, _breakdown, 7.5, 3.4),
    "bandwidth": Drawing({"h200-transfer.json": series.bandwidth}, _bandwidth, 7.5, 3.2),
    "memory": Drawing({"h200-memory.json": series.device_bytes}, _memory, 7.5, 3.6),
    "ablation": Drawing({"smollm2-ablation.json": series.ablation}, _ablation, 7.5, 3.4),
    "ablation-speed": Drawing({"h200-ablation.json": series.ablation_speed_steps}, _ablation_speed, 7.5, 2.8),
}  # fmt: skip


def draw(drawing: Drawing, results: pathlib.Path) -> bytes:
    """A PNG.

    Raises:
      ValueError: what a file lacks, by its name.
      RuntimeError: matplotlib is not installed.
    """
    shown, titles = [], []
    for file, of in drawing.sources.items():
        try:
            content = json.loads((results / file).read_text())
            report.validate(content)
            shown.append(of(content))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        except KeyError as error:
            raise ValueError(f"{file}: got a row without {error}, wanted it for the figure") from None
        titles.append(f"{file}: {_subject(content)}")
    png = io.BytesIO()
    with _styled():
        figure = new_figure(drawing.width, drawing.height)
        drawing.draw(figure, *shown)
        figure.suptitle("\n".join(textwrap.fill(title, int(17 * drawing.width)) for title in titles), color="0.35")
        # matplotlib's version would be in it.
        figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _subject(content: series.Content) -> str:
    """Model, what is synthetic, machine."""
    args, machine = content["args"], content["hardware"]
    dtype = None if args.get("dtype") == "auto" else args.get("dtype")
    named = args.get("model") or pathlib.PurePath(args.get("checkpoint") or "").name
    hits = f"hits {args['hits']}" if "hits" in args else None
    where = [gpu.split(",")[0] for gpu in machine.get("gpus", ())] or [machine["cpu"]]
    return ", ".join(filter(None, [named, dtype, hits, *dict.fromkeys(where)]))


@contextlib.contextmanager
def _styled() -> Iterator[None]:
    require_matplotlib()
    from matplotlib import style

    with style.context(["default", STYLE], after_reset=True):
        yield


def _draw_lines(axis: Any, lines: series.Lines, names: Sequence[str], label: str, side: float = _SIDE) -> None:
    """A line for each name that is there, in the colour of its place among `names`, over a logarithmic axis."""
    for name, line in lines.items():
        number = names.index(name)
        beside = side ** (number - (len(names) - 1) / 2)
        axis.plot([x * beside for x, _ in line], [y for _, y in line], color=f"C{number}", label=name)
    values = sorted({x for line in lines.values() for x, _ in line})
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [_count(x) for x in values])
    axis.set_xlim(values[0] / 1.3, values[-1] * 1.3)
    axis.minorticks_off()
    axis.set_xlabel(label)


def _count(number: float) -> str:
    for unit, letter in ((2**20, "M"), (2**10, "K")):
        if number % unit == 0:
            return f"{number // unit}{letter}"
    return f"{number:,}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draws the figures of the docs from results files.")
    parser.add_argument("--results", type=pathlib.Path, default=report.RESULTS, help="folder of the files")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs"), help="folder of the PNGs")
    args = parser.parse_args(argv)
    for option in ("results", "out"):
        if not getattr(args, option).is_dir():
            parser.error(f"--{option}: got {getattr(args, option)}, wanted a folder that exists")
    failed = []
    for name, drawing in DRAWINGS.items():
        path = args.out / f"{name}.png"
        absent = [file for file in drawing.sources if not (args.results / file).exists()]
        if absent:
            print(f"{path.name}: skipped, there is no {', '.join(absent)}", file=sys.stderr)
            continue
        try:
            path.write_bytes(draw(drawing, args.results))
        except ValueError as error:
            failed.append(f"{path.name}: {error}")
        except RuntimeError as error:
            parser.exit(1, f"{error}\n")
        else:
            print(f"{path}: written", file=sys.stderr)
    if failed:
        parser.exit(1, "\n".join(failed) + "\n")


if __name__ == "__main__":
    main()
