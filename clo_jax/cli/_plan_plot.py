"""A plan as a picture: heads by layers, one map each for importance, similarity, threshold and who is resident."""

import pathlib
from typing import Any

from clo_jax.pictures import new_figure, save


def draw(path: pathlib.Path, plan: Any, importance: Any, similarity: Any, title: str) -> None:
    """Writes a PNG (or what the file's ending says).

    Args:
      plan: a `cache.planner.Plan`. importance, similarity: [L, K].

    Raises:
      RuntimeError: matplotlib is not installed.
    """
    L, K = plan.thresholds.shape
    figure = new_figure(max(6.0, 1.5 + 0.22 * L), 1.2 + 4 * max(1.1, 0.14 * K))
    maps = (
        ("importance", importance, "viridis", 0, 1),
        ("mean similarity of adjacent steps", similarity, "viridis", 0, 1),
        ("threshold", plan.thresholds.clip(-1, 1), "coolwarm", -1, 1),
        ("resident", plan.is_resident(), "Greys", 0, 1),
    )
    axes = figure.subplots(len(maps), 1, sharex=True)
    for axis, (name, values, colours, low, high) in zip(axes, maps, strict=True):
        image = axis.imshow(values.T, aspect="auto", cmap=colours, vmin=low, vmax=high, interpolation="nearest")
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_ylabel("KV head")
        axis.set_yticks(range(0, K, max(1, K // 4)))
        if name != "resident":
            figure.colorbar(image, ax=axis, pad=0.01)
    axes[-1].set_xlabel("layer")
    save(figure, path, title)
