"""RULER's counting tasks: the most common words of a list (cwe), the most frequent words of a coded text (fwe)."""

import itertools
import math
import random

from clo_jax.eval import words
from clo_jax.eval.samples import Draft
from clo_jax.eval.sources import Sources

COMMON = 10
_LONG = 4096  # from this length on, lists are longer and repeat more often


def common_words(rng: random.Random, size: int, length: int, sources: Sources, index: int) -> Draft:
    """cwe; `size`: words that are not common. An example with its answer comes first.

    Words appear 30 and 3 times (10 and 3 in the example of 40 words); below 4,096 tokens 6 and 1 times (3 and 1 in an
    example of 20 words).
    """
    long = length >= _LONG
    example, shown = _word_list(rng, 40 - COMMON if long else 20 - COMMON, *((10, 3) if long else (3, 1)))
    listed, common = _word_list(rng, size, *((30, 3) if long else (6, 1)))
    solved = f"{example}\n{_COMMON_PREFIX} " + " ".join(f"{i}. {word}" for i, word in enumerate(shown, 1))
    return Draft(f"{solved}\n\n{listed}", _COMMON_PREFIX, tuple(common))


_COMMON_PREFIX = f"Answer: The {COMMON} most frequent words of the list are:"


def _word_list(rng: random.Random, others: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """(message, common words). Words are nouns while there are enough of them, else pairs: never a word inside another
    one's pair, which would count as an answer."""
    number = COMMON + others
    if number <= len(words.NOUNS):
        chosen = rng.sample(words.NOUNS, number)
    else:
        chosen = words.pairs(rng, number)
    listed = chosen[:COMMON] * often + chosen[COMMON:] * seldom
    rng.shuffle(listed)
    text = (
        "The following numbered list repeats some words more often than others. Remember the most frequent ones.\n\n"
        + " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
        + f"\n\nQuestion: What are the {COMMON} most frequent words of the list above?"
    )
    return text, chosen[:COMMON]


_ALPHA = 2.0
_ZETA = math.pi**2 / 6  # zeta(2)
_NOISE = "..."
_TOKENS_PER_WORD = 50  # length / 50 different words


def frequent_words(rng: random.Random, size: int, length: int, sources: Sources, index: int) -> Draft:
    """fwe; `size` + `_LEAST` words before rounding. Word number r of the vocabulary appears in proportion to r^-2; the
    most frequent one is noise, and the next three are the answer."""
    vocabulary = words.distinct(lambda: words.coded(rng), max(length // _TOKENS_PER_WORD, 8))
    vocabulary[0] = _NOISE
    total = size + _LEAST
    counts = [int(total * rank**-_ALPHA / _ZETA) for rank in range(1, len(vocabulary) + 1)]
    listed = list(itertools.chain.from_iterable([word] * n for word, n in zip(vocabulary, counts, strict=True)))
    rng.shuffle(listed)
    text = (
        "The words of the following text are coded. Count how often each of them appears.\n\n"
        + " ".join(listed)
        + f"\n\nQuestion: Which three coded words are the most frequent in the text above? The dots ({_NOISE}) do not "
        "count. Give no explanation."
    )
    return Draft(text, "Answer: The three most frequent coded words are:", tuple(vocabulary[1:4]))


# With 80 words the ranks 2 to 5 appear 12, 5, 3 and 1 times: which three come first is never a tie.
_LEAST = 80
