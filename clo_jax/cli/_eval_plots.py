"""Evaluations as pictures."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from clo_jax.pictures import new_figure, save


def draw_scores(path: pathlib.Path, summaries: Sequence[Any], title: str) -> None:
    """Means by length with their intervals, and the scores of each task at the longest."""
    figure = new_figure(11, 7)
    above, below = figure.subplots(2, 1)
    variants = list(dict.fromkeys(s.variant for s in summaries))
    lengths = sorted({s.length for s in summaries})
    for number, name in enumerate(variants):
        own = sorted((s for s in summaries if s.variant == name), key=lambda s: s.length)
        means = [s.mean.value for s in own]
        errors = [[s.mean.value - s.mean.low for s in own], [s.mean.high - s.mean.value for s in own]]
        # Side by side, so that equal scores do not hide each other.
        places = [s.length * 1.02 ** (number - (len(variants) - 1) / 2) for s in own]
        above.errorbar(places, means, errors, marker="o", capsize=3, label=name)
        tasks = own[-1].tasks
        width = 0.8 / len(variants)
        at = [i + width * (number - (len(variants) - 1) / 2) for i in range(len(tasks))]
        below.bar(at, [score.value for score in tasks.values()], width, label=name)
    above.set_xscale("log", base=2)
    above.set_xticks(lengths, [f"{n:,}" for n in lengths])
    above.set_xlim(lengths[0] / 1.5, lengths[-1] * 1.5)
    above.minorticks_off()
    above.set_xlabel("tokens of prompt and answer")
    above.set_ylabel("mean over tasks")
    above.legend(fontsize=8)
    below.set_xticks(range(len(tasks)), list(tasks), rotation=30, ha="right", fontsize=8)
    below.set_title(f"{lengths[-1]:,} tokens", fontsize=9, loc="left")
    below.set_ylabel("score")
    save(figure, path, title)


def draw_grid(path: pathlib.Path, summaries: Sequence[Any], title: str) -> None:
    """A heat map for each variant: depth by length."""
    variants = list(dict.fromkeys(s.variant for s in summaries))
    lengths = sorted({s.length for s in summaries})
    depths = list(summaries[0].tasks)
    columns = min(3, len(variants))
    lines = math.ceil(len(variants) / columns)
    figure = new_figure(1.5 + columns * max(2.6, 0.55 * len(lengths)), 1.2 + lines * max(2.2, 0.32 * len(depths)))
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axis in axes[len(variants) :]:
        axis.set_visible(False)
    for axis, name in zip(axes, variants, strict=False):
        by_length = {s.length: s.tasks for s in summaries if s.variant == name}
        values = [[by_length[n][depth].value for n in lengths] for depth in depths]
        image = axis.imshow(values, aspect="auto", cmap="RdYlGn", vmin=0, vmax=100, interpolation="nearest")
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45, fontsize=7)
        axis.set_yticks(range(len(depths)), [depth.removeprefix("depth ") for depth in depths], fontsize=7)
        axis.set_xlabel("tokens", fontsize=8)
        axis.set_ylabel("depth of the needle", fontsize=8)
    figure.colorbar(image, ax=list(axes[: len(variants)]), label="score")
    save(figure, path, title)


def draw_divergences(path: pathlib.Path, results: Sequence[Any], title: str) -> None:
    """KL at each decoded token of the longest length, with its running mean, and how it is distributed."""
    import numpy as np

    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    longest = max(r.length for r in results)
    # Where both predict the same, a logarithm still wants a number.
    values = {r.variant: np.maximum(r.kl, 1e-9) for r in results if r.length == longest and r.attention != "full"}
    for name, kl in values.items():
        places = longest - len(kl) + np.arange(len(kl))
        (line,) = left.plot(places, np.cumsum(kl) / np.arange(1, len(kl) + 1), label=name)
        left.plot(places, kl, ".", markersize=2, alpha=0.5, color=line.get_color())
        right.plot(np.sort(kl), 100 * np.arange(1, len(kl) + 1) / len(kl), color=line.get_color(), label=name)
    bounds = [bound for kl in values.values() for bound in (kl.min() / 2, kl.max() * 2)]
    left.set_yscale("log")
    left.set_xlabel("token of the text")
    left.set_ylabel("KL(full || policy), nats; line: mean so far")
    right.set_xscale("log")
    if bounds:
        left.set_ylim(min(bounds), max(bounds))
        right.set_xlim(min(bounds), max(bounds))
    right.set_xlabel("KL, nats")
    right.set_ylabel("% of tokens at or below")
    if left.lines:
        left.legend(fontsize=8)
    save(figure, path, f"{title}; {longest:,} tokens")
