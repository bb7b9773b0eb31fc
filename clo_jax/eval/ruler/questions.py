"""RULER's question answering (qa_1: SQuAD, qa_2: HotpotQA): the documents with the answer among many others."""

import random
from typing import Literal

from clo_jax.eval.samples import Draft
from clo_jax.eval.sources import QuestionSet, Sources

_INTRO = "Answer the question from the documents below. Give the answer only, nothing else."


class Questions:
    """The task over one source. Distractors come from what is related to the question first, then from anywhere."""

    def __init__(self, source: Literal["squad", "hotpot"]) -> None:
        self.source = source

    def __call__(self, rng: random.Random, size: int, length: int, sources: Sources, index: int) -> Draft:
        """`size` - 1: documents beside those with the answer.

        Raises:
          ValueError: there are fewer questions than samples.
        """
        found: QuestionSet = getattr(sources, self.source)
        if index >= len(found.questions):
            raise ValueError(
                f"samples: got more than {len(found.questions)}, wanted at most the questions of the {self.source} file"
            )
        question = found.questions[index]
        wanted = size - 1
        related = rng.sample(question.related, min(wanted, len(question.related)))
        taken = {*question.gold, *question.related}
        others = [n for n in range(len(found.documents)) if n not in taken] if wanted > len(related) else []
        more = rng.sample(others, min(wanted - len(related), len(others)))
        numbers = [*question.gold, *related, *more]
        rng.shuffle(numbers)
        documents = "\n\n".join(f"Document {i}:\n{found.documents[n]}" for i, n in enumerate(numbers, 1))
        text = f"{_INTRO}\n\n{documents}\n\n{_INTRO}\n\nQuestion: {question.text}"
        return Draft(text, "Answer:", question.answers)

    def most(self, sources: Sources) -> int:
        """The size that takes all documents."""
        return len(getattr(sources, self.source).documents)
