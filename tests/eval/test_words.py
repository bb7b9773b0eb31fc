"""Words of tasks: distinct, and enough of them."""

import random

from clo_jax.eval import words


def test_lists_hold_every_word_once():
    for listed in (words.ADJECTIVES, words.NOUNS):
        assert len(set(listed)) == len(listed) and all(word.isalpha() and word.islower() for word in listed)
    assert not set(words.ADJECTIVES) & set(words.NOUNS)


def test_pairs_are_distinct_however_many():
    few, many = words.pairs(random.Random(0), 500, {"amber-lantern"}), words.pairs(random.Random(0), 60_000)
    assert len(set(few)) == 500 and {pair.count("-") for pair in few} == {1} and "amber-lantern" not in few
    assert len(set(many)) == 60_000 and {pair.count("-") for pair in many} == {2}
