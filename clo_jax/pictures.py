"""Pictures: how they are made and written."""

import pathlib
import textwrap
from typing import Any


def require_matplotlib() -> None:
    """Raises RuntimeError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RuntimeError("pictures: matplotlib is not installed: pip install 'clo-jax[plot]'") from None


def new_figure(width: float, height: float) -> Any:
    """An empty one, sizes in inches.

    Raises:
      RuntimeError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Any, path: pathlib.Path, title: str) -> None:
    """Writes a PNG (or what the file's ending says)."""
    drawn.suptitle(textwrap.fill(title, int(11 * drawn.get_figwidth())), fontsize=9)
    drawn.savefig(path, dpi=130)
