"""Answers of a model as they come, in a JSON Lines file that an interrupted run continues."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from clo_jax.errors import CloError
from clo_jax.eval.selection import Kept


class Key(NamedTuple):
    """Which answer: of a variant with these settings (a digest), to a sample."""

    variant: str
    settings: str
    length: int
    task: str
    index: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """`rows_moved` and `selected`, `attended` (see `budget.Shares`) are of this answer: a batch's rows divided by its
    size. None where the policy does not count it."""

    key: Key
    text: str
    new_tokens: int
    finish_reason: str
    hit_rate: float | None = None
    rows_moved: float | None = None
    selected: float | None = None
    attended: float | None = None

    def to_line(self) -> str:
        values = dataclasses.asdict(self)
        return json.dumps(values.pop("key")._asdict() | values) + "\n"

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Answer":
        return cls(Key(*(values.pop(name) for name in Key._fields)), **values)


def digest(value: Any) -> str:
    """Twelve digits for a JSON value, the same whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


class AnswerFile:
    """The answers of one setup: FOLDER/answers-DIGEST.jsonl, whose first line is the setup.

    What answers depend on beside their keys (weights, tokenizer, seed, data type) is the setup; another one has another
    file. `described`: what the LLM of a variant with those settings said of itself, by (variant, settings). `kept`:
    what a variant keeps of what full attention looks at, along full attention's answer. A last line that was cut by an
    interruption is dropped.
    """

    def __init__(self, folder: Path, setup: Mapping[str, Any]) -> None:
        """Raises CloError for a file that holds something else."""
        self.path = folder / f"answers-{digest(dict(setup))}.jsonl"
        self.answers: dict[Key, Answer] = {}
        self.kept: dict[Key, Kept] = {}
        self.described: dict[tuple[str, str], dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        data = self.path.read_bytes() if self.path.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        if whole:
            self._take(data[:whole].decode("utf-8").split("\n")[1:-1])
        else:
            self._append([json.dumps({"setup": dict(setup)}, default=str) + "\n"])

    def _take(self, lines: list[str]) -> None:
        for number, line in enumerate(lines, 2):
            try:
                values = json.loads(line)
                if "described" in values:
                    self.described[values["variant"], values["settings"]] = values["described"]
                    continue
                if "kept" in values:
                    kept = Kept(**values.pop("kept"))
                    self.kept[Key(**values)] = kept
                    continue
                answer = Answer.from_values(values)
            except (ValueError, TypeError, KeyError) as error:
                raise CloError(
                    f"{self.path}, line {number}: not an answer ({error}); remove the line, or the file to start anew"
                ) from None
            self.answers[answer.key] = answer

    def describe(self, variant: str, settings: str, described: Mapping[str, Any]) -> None:
        """Keeps what an LLM says of itself."""
        described = {
            key: value for key, value in described.items() if key != "checkpoint"
        }  # where it lies is no matter
        if self.described.get((variant, settings)) != described:
            self._append([json.dumps({"variant": variant, "settings": settings, "described": described}) + "\n"])
            self.described[variant, settings] = described

    def keep(self, key: Key, kept: Kept) -> None:
        """Keeps what a policy keeps along full attention's answer to a sample."""
        self._append([json.dumps(key._asdict() | {"kept": kept._asdict()}) + "\n"])
        self.kept[key] = kept

    def add(self, answers: Iterable[Answer]) -> None:
        """Keeps them, on the disk too."""
        answers = list(answers)
        self._append(answer.to_line() for answer in answers)
        self.answers |= {answer.key: answer for answer in answers}

    def _append(self, lines: Iterable[str]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
