"""What an answer is worth: RULER's two metrics, and how an answer is cleaned before it is judged."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(answer: str) -> str:
    """The answer with control characters turned into line breaks, without blanks around it (RULER's rule)."""
    return _CONTROL.sub("\n", answer).strip()


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Share of the references that the cleaned answer contains, in any case of letters; in [0, 1]."""
    text = clean(answer).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 when the cleaned answer contains any of the references, in any case of letters, else 0."""
    text = clean(answer).lower()
    return max(float(reference.lower() in text) for reference in references)
