"""The document generator: length, depth, distinct sentences, determinism."""

import re

import pytest

from clo_jax.eval.haystack import haystack, number_fact, sentences

GOLDEN = (
    "The bicycle frames near the forest nursery were hard to explain, so Boris Quill collected them without asking "
    "for help."
)


class Words:
    """A tiny tokenizer: a token is a word, a punctuation mark, a digit or a paragraph break; long words are two."""

    def encode(self, text):
        return [
            piece for word in re.findall(r"\d|[^\W\d]+|\n\n|[^\w\s]", text) for piece in (word[:6], word[6:]) if piece
        ]


class Bytes:
    """Tokens across sentence borders: pairs of bytes, so that the whole is not the sum of the sentences."""

    def encode(self, text):
        return [text[i : i + 2] for i in range(0, len(text), 2)]


class Framed(Words):
    """Puts a token before and after the text, as many tokenizers do."""

    def encode(self, text):
        return ["<s>", *super().encode(text), "</s>"]


@pytest.mark.parametrize("tokenizer", [Words(), Bytes(), Framed()])
@pytest.mark.parametrize("num_tokens", [500, 1000, 6200])
@pytest.mark.parametrize("seed", range(4))
def test_length_within_one_percent_and_facts_at_their_depths(num_tokens, seed, tokenizer):
    facts = [(number_fact(place, seed)[0], depth) for place, depth in (("harbour", 0.9), ("lighthouse", 0.25))]
    text = haystack(num_tokens, tokenizer, seed, facts)
    assert abs(len(tokenizer.encode(text)) - num_tokens) * 100 <= num_tokens
    for sentence, depth in facts:
        assert text.count(sentence) == 1
        before = len(tokenizer.encode(text[: text.index(sentence)]))
        assert abs(before / num_tokens - depth) < 100 / num_tokens


@pytest.mark.parametrize("depth, at", [(0.0, 0), (1.0, -1)])
def test_first_and_last_place(depth, at):
    text = haystack(800, Words(), 1, [("A fact stands here.", depth)])
    assert text.startswith("A fact stands here.") if at == 0 else text.endswith("A fact stands here.")


def test_sentences_are_distinct_and_hold_no_digit():
    text = haystack(6200, Words(), 3)
    found = re.findall(r"[^.]+\.", text)
    assert len(found) > 200
    assert len({sentence.strip() for sentence in found}) == len(found)
    assert not re.search(r"\d", text)
    assert all(re.match(r"[A-Z]", sentence.strip()) for sentence in found)


def test_same_arguments_same_text_other_seed_other_text():
    assert haystack(700, Words(), 5) == haystack(700, Words(), 5)
    assert haystack(700, Words(), 5) != haystack(700, Words(), 6)
    first = sentences(0)
    again = sentences(0)
    assert [next(first) for _ in range(3)] == [next(again) for _ in range(3)]


def test_golden_sentence():
    assert next(sentences(0)) == GOLDEN


def test_number_fact():
    sentence, number = number_fact("lighthouse", 0)
    assert sentence == f"The secret number of the lighthouse is {number}."
    assert re.fullmatch(r"[1-9]\d{6}", number)
    assert number_fact("lighthouse", 0) != number_fact("lighthouse", 1)


def test_depth_outside_the_document_is_refused():
    with pytest.raises(ValueError, match=r"facts: got depth 1.5 for 'A fact.', wanted a number in \[0, 1\]"):
        haystack(800, Words(), 0, [("A fact.", 1.5)])


def test_facts_longer_than_the_document_are_refused():
    with pytest.raises(ValueError, match="num_tokens: got 20, wanted a length"):
        haystack(20, Words(), 0, [("word " * 30, 0.5)])
