"""Retrieval prompts for head importance: a long text with several pass phrases hidden in it, then a question about each
of them with its answer (the task of DuoAttention's training set; wording and word list are our own)."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from clo_jax.eval.haystack import haystack

# Short common nouns: every one names a thing, so that no phrase is easier to guess than another.
WORDS = (
    "anchor basket candle dragon engine feather garden hammer island jacket kettle ladder mirror needle orange pencil "
    "quartz ribbon saddle tunnel umbrella violin window yellow zebra copper"
).split()
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
MAX_NEEDLES = len(_ORDINALS)
_DEPTHS = (0.05, 0.95)  # as in the original: nothing hides in the sink or right before the questions


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]: ...


@dataclasses.dataclass(frozen=True)
class Example:
    """A text and where it is answered. `answer[i]`: token i + 1 is part of an answer, so that what the model makes of
    token i is what predicts it."""

    tokens: np.ndarray  # int32 [N]
    answer: np.ndarray  # bool [N]

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.answer.shape != self.tokens.shape or not self.answer.any():
            raise ValueError(
                f"answer: got shape {self.answer.shape} with {int(np.sum(self.answer))} answer tokens for tokens of "
                f"shape {self.tokens.shape}, wanted one flag a token and at least one answer token"
            )


def passkey_example(num_tokens: int, tokenizer: Encoder, seed: int, needles: int = 10, words: int = 32) -> Example:
    """One prompt of about `num_tokens` tokens, questions and answers included. The same arguments, the same prompt.

    Args:
      num_tokens: wanted length; the document gets what questions and answers leave (within 1 % of it).
      tokenizer: of the model.
      seed: of document, phrases and depths.
      needles: phrases, 1 to `MAX_NEEDLES`. words: of each phrase.

    Raises:
      ValueError: needles or words out of range, or a length that is too short for them.
    """
    if not 1 <= needles <= MAX_NEEDLES:
        raise ValueError(f"needles: got {needles}, wanted 1 to {MAX_NEEDLES}")
    if words < 1:
        raise ValueError(f"words: got {words}, wanted a positive integer")
    rng = random.Random(f"clo-jax passkeys {seed}")
    phrases = [" ".join(rng.choices(WORDS, k=words)) for _ in range(needles)]
    low, high = _DEPTHS
    depths = sorted(low + (high - low) * rng.randrange(1000) / 999 for _ in range(needles))
    facts = [
        (f"Keep these words in mind: the {ordinal} pass phrase is {phrase}.", depth)
        for ordinal, phrase, depth in zip(_ORDINALS, phrases, depths, strict=False)
    ]
    tail: list[tuple[list[int], bool]] = []
    for ordinal, phrase in zip(_ORDINALS, phrases, strict=False):
        for text, is_answer in (
            (f"\n\nWhat is the {ordinal} pass phrase? It is", False),
            (" " + phrase, True),
            (".", False),
        ):
            tail.append((list(tokenizer.encode(text, False)), is_answer))
    room = num_tokens - sum(len(ids) for ids, _ in tail)
    inside = sum(len(tokenizer.encode(" " + sentence, False)) for sentence, _ in facts)
    if room < 2 * inside:  # else most of the document would be phrases
        needed = num_tokens - room + 2 * inside
        raise ValueError(
            f"num_tokens: got {num_tokens}, wanted at least {needed} for {needles} phrases of {words} words (or fewer, "
            "or shorter ones)"
        )
    ids = list(tokenizer.encode(haystack(room, tokenizer, seed, facts)))
    flags = [False] * len(ids)
    for part, is_answer in tail:
        ids += part
        flags += [is_answer] * len(part)
    return Example(np.asarray(ids, np.int32), np.asarray([*flags[1:], False]))


def passkey_examples(
    number: int, lengths: Sequence[int], tokenizer: Encoder, seed: int, needles: int = 10, words: int = 32
) -> list[Example]:
    """`number` prompts that go through `lengths` in turn, each of its own seed."""
    return [
        passkey_example(lengths[i % len(lengths)], tokenizer, seed * 100_003 + i, needles, words) for i in range(number)
    ]
