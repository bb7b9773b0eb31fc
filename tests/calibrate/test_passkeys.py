"""Retrieval prompts: length, answers, seeds, what does not fit."""

import numpy as np
import pytest

from clo_jax.calibrate.passkeys import MAX_NEEDLES, WORDS, Example, passkey_example, passkey_examples


class Words:
    """A token is a word or a mark; ids are kept so that they can be read back."""

    def __init__(self):
        self.known = {}

    def encode(self, text, add_special_tokens=True):
        parts = text.replace(".", " . ").replace("?", " ? ").replace(",", " , ").replace(":", " : ").split()
        return [self.known.setdefault(part, len(self.known)) for part in parts]

    def decode(self, ids):
        words = {number: word for word, number in self.known.items()}
        return [words[int(number)] for number in ids]


def test_phrases_are_hidden_and_asked_for():
    words = Words()
    found = passkey_example(600, words, seed=3, needles=4, words=6)
    assert abs(len(found.tokens) - 600) <= 6
    text = " ".join(words.decode(found.tokens))
    answers = words.decode(found.tokens[1:][found.answer[:-1]])
    assert len(answers) == 4 * 6 and set(answers) <= set(WORDS)
    for i, ordinal in enumerate(("first", "second", "third", "fourth")):
        phrase = " ".join(answers[6 * i : 6 * i + 6])
        assert text.count(f"the {ordinal} pass phrase is {phrase} .") == 1
        assert text.count(f"What is the {ordinal} pass phrase ? It is {phrase} .") == 1
        assert 0.02 < text.index(f"the {ordinal} pass phrase is") / len(text) < 0.9


def test_same_seed_same_prompt():
    one, same, other = (passkey_example(600, Words(), seed, 3, 5) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.tokens, same.tokens)
    assert one.tokens.shape != other.tokens.shape or (one.tokens != other.tokens).any()


def test_lengths_take_turns():
    found = passkey_examples(4, (400, 600), Words(), 0, 2, 4)
    assert [round(len(example.tokens), -2) for example in found] == [400, 600, 400, 600]


@pytest.mark.parametrize(
    "arguments, named",
    [
        ((600, 0, 4), "needles: got 0"),
        ((600, MAX_NEEDLES + 1, 4), "needles: got 11"),
        ((600, 2, 0), "words: got 0"),
        ((300, 10, 32), "num_tokens: got 300, wanted at least"),
    ],
)
def test_what_does_not_fit_is_named(arguments, named):
    tokens, needles, words = arguments
    with pytest.raises(ValueError, match=named):
        passkey_example(tokens, Words(), 0, needles, words)


def test_an_example_needs_an_answer():
    with pytest.raises(ValueError, match=r"answer: got shape \(3,\) with 0 answer tokens"):
        Example(np.zeros(3, np.int32), np.zeros(3, bool))
