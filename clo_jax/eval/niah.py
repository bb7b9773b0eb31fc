"""Needle in a haystack: one number hidden at each of several depths in texts of each length."""

from collections.abc import Sequence

from clo_jax.eval.metrics import string_match_all
from clo_jax.eval.ruler.needles import Needles
from clo_jax.eval.samples import GeneratedTask

ANSWER_TOKENS = 32


def task_name(depth: float) -> str:
    return f"depth {depth:g}"


def tasks(depths: Sequence[float]) -> tuple[GeneratedTask, ...]:
    """One task for each depth, the share of the text before the needle.

    Raises:
      ValueError: a depth outside [0, 1].
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depths: got {depth}, wanted numbers in [0, 1]")
    return tuple(
        GeneratedTask(task_name(depth), ANSWER_TOKENS, string_match_all, Needles("prose", depth=depth))
        for depth in dict.fromkeys(depths)
    )
