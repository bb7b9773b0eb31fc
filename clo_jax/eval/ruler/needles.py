"""RULER's needle tasks: facts hidden in a long text, one or several of them asked for. Wording is our own."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Literal

from clo_jax.eval import words
from clo_jax.eval.samples import Draft
from clo_jax.eval.sources import Sources

FILLER = (
    "The road is long.",
    "The hills are low.",
    "The air is cool.",
    "We walk on.",
    "Over the bridge and home again.",
)
DEPTHS = tuple(i / 39 for i in range(40))  # the places where a needle may stand


@dataclasses.dataclass(frozen=True)
class Needles:
    """A needle task. `hay`: five short sentences over and over, prose, or needles that nobody asks for. Each of `keys`
    keys has `values` values; `asked` of the keys are asked for. `depth`: where the only needle stands; None: anywhere.
    """

    hay: Literal["filler", "prose", "needles"] = "prose"
    code_keys: bool = False
    code_values: bool = False
    keys: int = 1
    values: int = 1
    asked: int = 1
    depth: float | None = None

    def __call__(self, rng: random.Random, size: int, length: int, sources: Sources, index: int) -> Draft:
        """`size`: sentences of the hay."""
        keys_of = words.codes if self.code_keys else words.pairs
        value_of = words.code if self.code_values else words.number
        kind = "code" if self.code_values else "number"
        keys = keys_of(rng, self.keys)
        values = words.distinct(lambda: value_of(rng), self.keys * self.values)
        facts = [(keys[i // self.values], value) for i, value in enumerate(values)]
        asked = rng.sample(keys, self.asked)
        places = sorted(rng.sample(DEPTHS, len(facts))) if self.depth is None else [self.depth]
        order = rng.sample(facts, len(facts))
        if self.hay == "filler":
            hay = [FILLER[i % len(FILLER)] for i in range(size)]
        elif self.hay == "prose":
            hay = sources.sentences(rng, size)
        else:
            others = keys_of(rng, size, set(keys))
            hay = [_needle(kind, key, value_of(rng)) for key in others]
        text = insert(hay, [_needle(kind, key, value) for key, value in order], places)
        outputs = tuple(value for key in asked for k, value in facts if k == key)
        return Draft(*_question(kind, asked, len(outputs), text), outputs, tuple(places))


def insert(hay: Sequence[str], needles: Sequence[str], places: Sequence[float]) -> str:
    """The hay as one text with the needles between its sentences, each after that share of the sentences; `places`
    ascend."""
    parts: list[str] = []
    before = 0
    for needle, place in zip(needles, places, strict=True):
        at = round(place * len(hay))
        parts += [*hay[before:at], needle]
        before = at
    return " ".join([*parts, *hay[before:]])


def _needle(kind: str, key: str, value: str) -> str:
    return f"The secret {kind} for {key} is {value}."


def _question(kind: str, asked: Sequence[str], values: int, text: str) -> tuple[str, str]:
    """(message, opening of the answer)."""
    named = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + f", and {asked[-1]}"
    if values == 1:
        intro = f"A secret {kind} is hidden in the following text. Remember it: you will be asked for it afterwards."
        question = f"What is the secret {kind} for {named} mentioned in the text above?"
        prefix = f"The secret {kind} for {named} mentioned in the text is"
    else:
        intro = f"Secret {kind}s are hidden in the following text. Remember them: some will be asked for afterwards."
        question = f"What are all the secret {kind}s for {named} mentioned in the text above?"
        prefix = f"The secret {kind}s for {named} mentioned in the text are"
    return f"{intro}\n\n{text}\n\n{question}", prefix
