"""What tasks take from outside: text to hide needles in, and questions with documents. All local, all optional."""

import dataclasses
import hashlib
import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clo_jax.eval.haystack import sentences

_SENTENCE = re.compile(r"[^.!?]+[.!?]+[\"')\]]*|[^.!?]+$")


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its accepted answers, and documents by number: `gold` answer it, `related` are near it."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """Questions over one list of documents."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]
    sha256: str  # of the file


@dataclasses.dataclass(frozen=True)
class Sources:
    """`text`: sentences of the user's file; None: generated prose. `squad`, `hotpot`: None where no file was given."""

    text: tuple[str, ...] | None = None
    text_sha256: str | None = None
    squad: QuestionSet | None = None
    hotpot: QuestionSet | None = None

    @classmethod
    def read(
        cls, text: str | Path | None = None, squad: str | Path | None = None, hotpot: str | Path | None = None
    ) -> "Sources":
        """Reads the files that were given.

        Raises:
          ValueError: a file that is empty or not of its format; names it.
          OSError: a file that cannot be read.
        """
        found: dict[str, Any] = {}
        if text is not None:
            content = Path(text).read_text("utf-8")
            found["text"] = tuple(" ".join(s.split()) for s in _SENTENCE.findall(content) if s.strip())
            found["text_sha256"] = hashlib.sha256(content.encode()).hexdigest()
            if not found["text"]:
                raise ValueError(f"{text}: got no sentence, wanted text")
        if squad is not None:
            found["squad"] = read_squad(Path(squad))
        if hotpot is not None:
            found["hotpot"] = read_hotpot(Path(hotpot))
        return cls(**found)

    def sentences(self, rng: random.Random, number: int) -> list[str]:
        """`number` sentences in their order: generated, or of the user's text from a random one on (again from its
        beginning when it ends)."""
        if self.text is None:
            return list(itertools.islice(sentences(rng.getrandbits(32)), number))
        start = rng.randrange(len(self.text))
        return [self.text[(start + i) % len(self.text)] for i in range(number)]

    def digest(self, needs: str | None) -> str:
        """Of what a task's samples depend on: the question set that it needs, else the text."""
        if needs is not None:
            return getattr(self, needs).sha256
        return self.text_sha256 or "generated"

    def describe(self) -> dict[str, str | None]:
        """For results files."""
        return {
            "text": self.text_sha256 or "generated",
            "squad": self.squad and self.squad.sha256,
            "hotpot": self.hotpot and self.hotpot.sha256,
        }


def read_squad(path: Path) -> QuestionSet:
    """SQuAD's JSON (1.1 or 2.0): its answerable questions; a document is a paragraph, and the other paragraphs of its
    article are related."""
    documents: list[str] = []
    questions = []
    try:
        data = path.read_bytes()
        for article in json.loads(data)["data"]:
            contexts = [paragraph["context"] for paragraph in article["paragraphs"]]
            numbers = range(len(documents), len(documents) + len(contexts))
            documents += contexts
            for number, paragraph in zip(numbers, article["paragraphs"], strict=True):
                related = tuple(n for n in numbers if n != number)
                for qa in paragraph["qas"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                    if answers and not qa.get("is_impossible", False):
                        questions.append(Question(qa["question"], answers, (number,), related))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not SQuAD's JSON: {type(error).__name__} {error}") from None
    return _questions(path, documents, questions, data)


def read_hotpot(path: Path) -> QuestionSet:
    """HotpotQA's JSON (distractor setting): a document is a title with its sentences; those with supporting facts
    answer the question, the others that come with it are related."""
    known: dict[str, int] = {}
    questions = []
    try:
        data = path.read_bytes()
        for item in json.loads(data):
            own = {}
            for title, parts in item["context"]:
                own[title] = known.setdefault(f"{title}\n{''.join(parts)}", len(known))
            supporting = {title for title, _ in item["supporting_facts"]}
            gold = tuple(number for title, number in own.items() if title in supporting)
            related = tuple(number for title, number in own.items() if title not in supporting)
            questions.append(Question(item["question"], (item["answer"],), gold, related))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not HotpotQA's JSON: {type(error).__name__} {error}") from None
    return _questions(path, list(known), questions, data)


def _questions(path: Path, documents: Sequence[str], questions: Sequence[Question], data: bytes) -> QuestionSet:
    if not questions:
        raise ValueError(f"{path}: got no answerable question, wanted at least one")
    return QuestionSet(tuple(documents), tuple(questions), hashlib.sha256(data).hexdigest())
