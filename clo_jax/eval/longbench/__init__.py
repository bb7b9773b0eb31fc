"""LongBench (Bai et al. 2023): 21 sets of real long texts, read from the published JSON Lines files in a local folder,
with its metrics, answer lengths and truncation; wording of the prompts is our own.

The rule of truncation is the original's: a message that is too long loses its middle.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from clo_jax.eval.longbench import metrics
from clo_jax.eval.longbench.prompts import PROMPTS
from clo_jax.eval.samples import PromptFormat, Sample
from clo_jax.eval.sources import Sources

TRUNCATION = "messages longer than the length less the answer lose their middle: first and last half of the tokens stay"


@dataclasses.dataclass(frozen=True)
class _Kind:
    """`chat`: in the chat template; few-shot sets and code are not. `first_line`: only that counts."""

    metric: Literal["f1", "f1_zh", "rouge_l", "rouge_l_zh", "classification", "count", "retrieval", "code_similarity"]
    answer_tokens: int
    chat: bool = True
    first_line: bool = False


SETS = {
    "narrativeqa": _Kind("f1", 128),
    "qasper": _Kind("f1", 128),
    "multifieldqa_en": _Kind("f1", 64),
    "multifieldqa_zh": _Kind("f1_zh", 64),
    "hotpotqa": _Kind("f1", 32),
    "2wikimqa": _Kind("f1", 32),
    "musique": _Kind("f1", 32),
    "dureader": _Kind("rouge_l_zh", 128),
    "gov_report": _Kind("rouge_l", 512),
    "qmsum": _Kind("rouge_l", 512),
    "multi_news": _Kind("rouge_l", 512),
    "vcsum": _Kind("rouge_l_zh", 512),
    "trec": _Kind("classification", 64, chat=False, first_line=True),
    "triviaqa": _Kind("f1", 32, chat=False, first_line=True),
    "samsum": _Kind("rouge_l", 128, chat=False, first_line=True),
    "lsht": _Kind("classification", 64, chat=False, first_line=True),
    "passage_count": _Kind("count", 32),
    "passage_retrieval_en": _Kind("retrieval", 32),
    "passage_retrieval_zh": _Kind("retrieval", 32),
    "lcc": _Kind("code_similarity", 64, chat=False),
    "repobench-p": _Kind("code_similarity", 64, chat=False),
}


@dataclasses.dataclass(frozen=True, eq=False)
class LongBenchTask:
    """One set. `rows`: of its file, each with `context`, `input` and `answers`. `sha256`: of the file. `classes`: of a
    classification."""

    name: str
    rows: tuple[dict[str, Any], ...]
    sha256: str
    classes: tuple[str, ...] = ()

    @property
    def answer_tokens(self) -> int:
        return SETS[self.name].answer_tokens

    def missing(self, sources: Sources) -> str | None:
        """See `eval.samples.Task`: what its metric needs."""
        return "pip install 'clo-jax[longbench]'" if self._kind.metric.endswith("_zh") and _jieba() is None else None

    @property
    def _kind(self) -> _Kind:
        return SETS[self.name]

    def metric(self, answer: str, references: Sequence[str]) -> float:
        """The set's official metric."""
        found = getattr(metrics, self._kind.metric)
        if self._kind.metric.endswith("_zh"):
            found = functools.partial(found, cut=_jieba())
        if self._kind.metric == "classification":
            found = functools.partial(found, classes=self.classes)
        return found(metrics.first_line(answer) if self._kind.first_line else answer, references)

    def samples(
        self, number: int, length: int, prompts: PromptFormat, sources: Sources, seed: int, folder: Path,
        made: Callable[[int], Any],
    ) -> list[Sample | None]:  # fmt: skip
        """See `eval.samples.Task`: the first `number` rows, or all when there are fewer. They are named after the
        file's digest too, so that answers to another one are not taken for theirs."""
        found: list[Sample | None] = []
        for index, row in enumerate(self.rows[:number]):
            text = PROMPTS[self.name].format_map({"context": row["context"], "input": row["input"]})
            found.append(self._fit(index, text, tuple(row["answers"]), length, prompts))
            made(1)
        return found

    def _fit(
        self, index: int, text: str, answers: tuple[str, ...], length: int, prompts: PromptFormat
    ) -> Sample | None:
        """None: not even the chat template fits."""
        room, whole = length - self.answer_tokens, text
        ids = prompts.tokenizer.encode(text, add_special_tokens=False)
        keep = len(ids)
        while (tokens := len(prompts.encode(text, "", self._kind.chat))) > room:
            # The cut text and the template may make more tokens than were kept.
            keep -= max(tokens - room, 2)
            if keep < 2:
                return None
            half = keep // 2
            text = prompts.tokenizer.decode(ids[:half]) + prompts.tokenizer.decode(ids[-half:])
        return Sample(
            f"{self.name} {self.sha256[:8]}",
            index,
            text,
            "",
            answers,
            (),
            tokens,
            chat=self._kind.chat,
            cut=text != whole,
        )


def read(folder: str | Path, names: Sequence[str] | None = None) -> tuple[LongBenchTask, ...]:
    """The sets in a folder: NAME.jsonl each, as published.

    Args:
      names: which sets; None: all that are there.

    Raises:
      ValueError: an unknown name, a file that is not there or not LongBench's; names it.
    """
    folder = Path(folder)
    for name in names or ():
        if name not in SETS:
            raise ValueError(f"--tasks: got {name!r}, wanted {', '.join(SETS)}")
    chosen = [name for name in SETS if (folder / f"{name}.jsonl").exists()] if names is None else dict.fromkeys(names)
    if not chosen:
        raise ValueError(f"{folder}: got no set of LongBench, wanted files such as qasper.jsonl")
    return tuple(_read_set(folder / f"{name}.jsonl") for name in chosen)


def _read_set(path: Path) -> LongBenchTask:
    name = path.stem
    try:
        data = path.read_bytes()
        rows = [json.loads(line) for line in data.decode("utf-8").split("\n") if line.strip()]
        kept = tuple({key: row[key] for key in ("context", "input", "answers")} for row in rows)
        right = all(row["answers"] and all(isinstance(text, str) for text in row["answers"]) for row in kept)
        classes = tuple(rows[0]["all_classes"] or ()) if rows else ()
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a set of LongBench: {type(error).__name__} {error}") from None
    if not kept or not right:
        raise ValueError(f"{path}: got {'an empty answer' if kept else 'no row'}, wanted rows with answers")
    return LongBenchTask(name, kept, hashlib.sha256(data).hexdigest(), classes)


@functools.cache
def _jieba() -> Callable[[str], list[str]] | None:
    """Cuts Chinese text into words; None where jieba is not installed."""
    try:
        import jieba
    except ImportError:
        return None
    jieba.setLogLevel("WARNING")
    return jieba.lcut
