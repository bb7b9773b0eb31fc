"""Selection recall: how much of what full attention looks at most a policy attends to, along a given text.

At a decoded token (teacher forcing), for each KV head that the policy does not attend to in full: of the
k = ceil(sparsity · n) tokens that full attention's own query of that step gives the most softmax mass, summed over the
query heads of the group (n: tokens cached with the one being decoded), the share that the policy attends to exactly in
that step, by whatever means: sink, recent tokens, selected and retained rows. What is only estimated (RetroInfer) does
not count. Beside it the mass kept: of all of full attention's softmax mass, mean over the query heads of the group, the
share that is on the tokens that the policy attends to exactly. Both are means over heads, layers and steps.

The policy's set is that of its own run, so that the age of a set (CLO), a guessed query and the drift of a policy's
hidden states from full attention's are in it. Full attention has recall 1, as has a policy without a head of its own.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clo_jax.config import ModelConfig
from clo_jax.errors import CloError
from clo_jax.policies.attended import Attended


class Kept(NamedTuple):
    """Along one text: means in [0, 1], and of how many steps."""

    recall: float
    mass: float
    steps: int


class References:
    """What full attention looks at along some texts, in a temporary folder; a context manager.

    A text is `tokens`, of which the first `prefix` are prefilled and all others but the last are measured. `llm` is an
    `LLM`, or what has its `forced_attention`.
    """

    def __init__(self, config: ModelConfig, tokens: int, option: str) -> None:
        """tokens: of context at all measured steps together. option: the one that asks for fewer.

        Raises:
          CloError: no room in the temporary folder.
        """
        need, free = tokens * config.num_layers * config.num_kv_heads * 4, shutil.disk_usage(tempfile.gettempdir()).free
        if need > free:
            raise CloError(
                f"{tempfile.gettempdir()}: {free} bytes free, wanted {need} for what full attention looks at: a "
                f"smaller {option} (0: no selection recall), or another TMPDIR"
            )
        self._shape = (config.num_layers, config.num_kv_heads)
        self._folder = tempfile.TemporaryDirectory(prefix="clo-jax-")
        self._files: dict[Any, Path] = {}

    def __enter__(self) -> "References":
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()

    def __contains__(self, name: Any) -> bool:
        return name in self._files

    def take(
        self, name: Any, llm: Any, tokens: Sequence[int], prefix: int, advance: Callable[[int], Any] = lambda n: None
    ) -> None:
        """Measures full attention along a text; `name`: hashable, to find it by. `advance(1)`: after each step."""
        path = Path(self._folder.name) / str(len(self._files))
        with path.open("wb") as file:
            for layers in llm.forced_attention(tokens, prefix):
                np.stack([layer.mass for layer in layers]).astype(np.float32).tofile(file)
                advance(1)
        self._files[name] = path

    def compare(
        self, name: Any, llm: Any, tokens: Sequence[int], prefix: int, sparsity: float,
        advance: Callable[[int], Any] = lambda n: None,
    ) -> Kept:  # fmt: skip
        """What a policy at a sparsity keeps of it, along the same text."""
        recalls, masses, steps = [], [], 0
        with self._files[name].open("rb") as file:
            for layers in llm.forced_attention(tokens, prefix):
                n = prefix + steps + 1
                mass = np.fromfile(file, np.float32, math.prod(self._shape) * n).reshape(*self._shape, n)
                for own, of_layer in zip(layers, mass, strict=True):
                    recall, kept = shares(of_layer, own, sparsity)
                    recalls.append(recall)
                    masses.append(kept)
                steps += 1
                advance(1)
        return Kept(_mean(recalls), _mean(masses), steps)


def shares(mass: np.ndarray, attended: Attended, sparsity: float) -> tuple[np.ndarray, np.ndarray]:
    """Recall and mass kept of each head of `attended`, float64 [h], against full attention's mass [K, n]."""
    mass = mass[attended.heads]
    n = mass.shape[1]
    # As the policies count it: in float32.
    k = min(max(math.ceil(np.float32(sparsity) * np.float32(n)), 1), n)
    wanted = heaviest(mass, k)
    kept = np.where(attended.tokens, mass, 0).sum(axis=1, dtype=np.float64)
    return (wanted & attended.tokens).sum(axis=1) / k, kept / mass.sum(axis=1, dtype=np.float64)


def heaviest(mass: np.ndarray, k: int) -> np.ndarray:
    """bool [h, n]: the k tokens of each head with the most mass [h, n], ties to the lowest token."""
    n = mass.shape[1]
    bound = np.partition(mass, n - k, axis=1)[:, n - k, None]
    above, equal = mass > bound, mass == bound
    return above | (equal & (np.cumsum(equal, axis=1) <= k - above.sum(axis=1, keepdims=True)))


def _mean(values: list[np.ndarray]) -> float:
    """Over all heads; 1 where there is none."""
    every = np.concatenate(values)
    return float(every.mean()) if every.size else 1.0


WHOLE = Kept(1.0, 1.0, 1)  # of full attention, whatever the text
