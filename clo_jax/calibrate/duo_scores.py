"""Head scores that DuoAttention published: a TSV file, one row a layer, one column a KV head (or a query head)."""

import os
import pathlib

import numpy as np

from clo_jax.cache.calibration_parts import Importance
from clo_jax.config import ModelConfig
from clo_jax.errors import CheckpointError

SOURCE = "duo-attention file"


def read_duo_scores(path: str | os.PathLike, model: ModelConfig | None = None) -> Importance:
    """Reads a `full_attention_heads.tsv`.

    Trained gates may lie a little outside [0, 1]: they are clipped.

    Args:
      path: the file.
      model: what the scores must fit, [L, K] or [L, H]; None: any shape.

    Raises:
      CheckpointError: names the file, and the line where one is at fault: unreadable, not numbers, rows of different
        lengths, values that are not finite, or another shape than the model's.
    """
    path = pathlib.Path(path).expanduser()
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows: list[list[float]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = [float(field) for field in line.split()]
        except ValueError as error:
            raise CheckpointError(f"{path}, line {number}: {error}; wanted numbers separated by tabs") from None
        if not np.all(np.isfinite(row)):
            raise CheckpointError(f"{path}, line {number}: got a value that is not finite, wanted numbers")
        if rows and len(row) != len(rows[0]):
            raise CheckpointError(f"{path}, line {number}: got {len(row)} values, wanted {len(rows[0])} as above")
        rows.append(row)
    if not rows:
        raise CheckpointError(f"{path}: got no scores, wanted one row a layer")
    part = Importance(np.clip(np.asarray(rows), 0, 1).astype(np.float32), SOURCE)
    problem = None if model is None else part.misfit(model)
    if problem:
        raise CheckpointError(f"{path}: {problem} of the model")
    return part
