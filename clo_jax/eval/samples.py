"""Samples of a task: prompts of a wanted length with their right answers, made once and kept in a folder."""

import dataclasses
import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from clo_jax.errors import CloError
from clo_jax.eval.sources import Sources
from clo_jax.text import Tokenizer

GENERATORS = 1  # raised when a generator changes what it makes, so that kept samples of the old one are not used


class DoesNotFit(CloError):
    """The shortest prompt of a sample, with room for its answer, is longer than asked."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a task makes of a seed and a size: the message, the opening of the answer, and what belongs in the answer.

    `depths`: where each needle stands, as a share of the text before it; empty for tasks without needles.
    """

    text: str
    prefix: str
    outputs: tuple[str, ...]
    depths: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt that was fitted to a length. `task`: names what it is a sample of, in answers. `prompt_tokens`: of the
    whole prompt, chat template and prefix included. `chat`: False: bare text whatever the others are. `cut`: the middle
    of the text was left out."""

    task: str
    index: int
    text: str
    prefix: str
    outputs: tuple[str, ...]
    depths: tuple[float, ...]
    prompt_tokens: int
    chat: bool = True
    cut: bool = False


class Task(Protocol):
    """What a suite consists of. `answer_tokens`: room for the answer, and the most that is generated."""

    @property
    def name(self) -> str: ...

    @property
    def answer_tokens(self) -> int: ...

    def metric(self, answer: str, outputs: Sequence[str]) -> float:
        """What an answer is worth, in [0, 1]."""

    def missing(self, sources: Sources) -> str | None:
        """What is needed and not there; such tasks are left out by name."""

    def samples(
        self, number: int, length: int, prompts: "PromptFormat", sources: Sources, seed: int, folder: Path,
        made: Callable[[int], Any],
    ) -> list[Sample | None]:  # fmt: skip
        """At most `number` samples, None where one does not fit. `folder`: to keep them in. `made(1)`: after each."""


@dataclasses.dataclass(frozen=True)
class GeneratedTask:
    """A task whose samples are made up.

    `draft(rng, size, length, sources)` makes a prompt that grows with `size` >= 1; the same arguments, the same prompt.
    `needs`: the name of the source without which the task is left out. `most(sources)`: the largest size.
    """

    name: str
    answer_tokens: int
    metric: Callable[[str, Sequence[str]], float]
    draft: Callable[[random.Random, int, int, Sources, int], Draft]
    needs: str | None = None
    most: Callable[[Sources], int] | None = None

    def missing(self, sources: Sources) -> str | None:
        """See `Task`."""
        return f"--{self.needs} FILE" if self.needs and getattr(sources, self.needs) is None else None

    def samples(
        self, number: int, length: int, prompts: "PromptFormat", sources: Sources, seed: int, folder: Path,
        made: Callable[[int], Any],
    ) -> list[Sample | None]:  # fmt: skip
        """See `Task`; kept in `folder`."""
        return load_or_make(self, number, length, prompts, sources, seed, folder, made)


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """How a draft becomes token ids: in the chat template as one user message, with the prefix as the beginning of the
    answer; or as bare text."""

    tokenizer: Tokenizer
    chat: bool

    def encode(self, text: str, prefix: str, chat: bool = True) -> list[int]:
        """`chat`: False: bare text, whatever others are."""
        if not (self.chat and chat):
            return self.tokenizer.encode(f"{text}\n{prefix}" if prefix else text)
        rendered = self.tokenizer.render_chat([{"role": "user", "content": text}])
        return self.tokenizer.encode(rendered + prefix, add_special_tokens=False)

    def digest(self) -> str:
        return hashlib.sha256(f"{self.tokenizer.digest()} {self.chat}".encode()).hexdigest()


def make_sample(
    task: GeneratedTask, index: int, length: int, prompts: PromptFormat, sources: Sources, seed: int
) -> Sample:
    """Sample number `index`: the largest prompt that leaves room for the answer in `length` tokens.

    Raises:
      DoesNotFit: even the smallest one is longer.
    """
    room = length - task.answer_tokens

    def at(size: int) -> tuple[Draft, int]:
        rng = random.Random(f"clo-jax {task.name} {length} {seed} {index}")
        draft = task.draft(rng, size, length, sources, index)
        return draft, len(prompts.encode(draft.text, draft.prefix))

    draft, tokens = _largest(at, room, task.most(sources) if task.most else None)
    if tokens > room:
        raise DoesNotFit(
            f"{task.name}, sample {index}: the smallest prompt has {tokens} tokens, with {task.answer_tokens} for the "
            f"answer more than the {length} asked for"
        )
    return Sample(task.name, index, draft.text, draft.prefix, draft.outputs, draft.depths, tokens)


def _largest(at: Callable[[int], tuple[Draft, int]], room: int, most: int | None) -> tuple[Draft, int]:
    """The draft of the largest size that has at most `room` tokens, or one that is short of it by at most two units or
    half a percent; the smallest draft when none fits. Secant steps between bounds, because a prompt of 128K tokens
    takes a good part of a second to encode; halving when they do not get there (a task may change its words with its
    size)."""
    low, best = 1, at(1)
    if best[1] > room or most == 1:
        return best
    first, high, size, steps = best[1], None if most is None else most + 1, 9, 0
    while high is None or high - low > 1:
        size = max(low + 1, size if high is None else min(size, high - 1))
        found = at(size)
        unit = max((found[1] - first) / (size - 1), 0.5)
        if found[1] <= room:
            low, best = size, found
            if room - found[1] <= max(2 * unit, room // 200):
                break
        else:
            high = size
        steps += 1
        size = low + max(1, int((room - best[1]) / unit)) if steps < 8 or high is None else (low + high) // 2
    return best


# --- kept samples ----------------------------------------


def load_or_make(
    task: GeneratedTask, number: int, length: int, prompts: PromptFormat, sources: Sources, seed: int, folder: Path,
    made: Callable[[int], Any] = lambda n: None,
) -> list[Sample | None]:  # fmt: skip
    """`number` samples, read from `folder` as far as they are there; the others are made and added to the file.

    Args:
      task, length, prompts, sources, seed: what a sample depends on; they choose the file.
      made: called with 1 after each sample that was made.

    Returns:
      The samples in order; None where one does not fit the length.

    Raises:
      CloError: the file is not one of samples.
    """
    key = f"{GENERATORS} {prompts.digest()} {sources.digest(task.needs)}"
    name = f"{task.name}-{length}-{seed}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.jsonl"
    path = folder / name.replace(" ", "_")
    found = _read(path)[:number] if path.exists() else []
    if len(found) == number:
        return found
    for index in range(len(found), number):
        try:
            found.append(make_sample(task, index, length, prompts, sources, seed))
        except DoesNotFit:
            found.append(None)
        made(1)
    _write(path, found)
    return found


def _read(path: Path) -> list[Sample | None]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        return [
            line and Sample(**{**line, "outputs": tuple(line["outputs"]), "depths": tuple(line["depths"])})
            for line in lines
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CloError(f"{path}: not a file of samples ({error}); remove it, and it is made anew") from None


def _write(path: Path, samples: Sequence[Sample | None]) -> None:
    """In one step, so that an interrupted run leaves whole files only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for sample in samples:
            line = None if sample is None else dataclasses.asdict(sample)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
