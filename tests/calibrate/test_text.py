"""Prompts to calibrate on: wanted lengths, the same for the same seed, and nothing held out is trained on."""

import pytest

from clo_jax.calibrate.text import prompts
from clo_jax.text import Tokenizer
from tests import tiny_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(tiny_checkpoint.write_folder(tmp_path_factory.mktemp("text") / "hf"))


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"line {i} of a book." for i in range(2000)), encoding="utf-8")
    return path


def test_lengths_and_tasks(tokenizer):
    made = prompts(tokenizer, count=4, held_out=2, num_tokens=[2000, 3000])
    assert [round(len(p) / 1000) for p in made.train + made.held_out] == [2, 3, 2, 3, 2, 3]
    for place, prompt in enumerate(made.train + made.held_out):
        assert abs(len(prompt) / [2000, 3000][place % 2] - 1) < 0.03
        text = tokenizer.decode(prompt)
        assert ("What is the secret number of the" in text) == (place % 2 == 0)
        assert ("The secret number of the" in text) == (place % 2 == 0)


def test_seeds_and_the_held_out_share(tokenizer):
    first = prompts(tokenizer, count=3, held_out=2, num_tokens=1500, seed=5)
    assert first.sha256() == prompts(tokenizer, count=3, held_out=2, num_tokens=1500, seed=5).sha256()
    other = prompts(tokenizer, count=3, held_out=2, num_tokens=1500, seed=6)
    texts = [tokenizer.decode(p) for p in first.train + first.held_out + other.train]
    sentences = [
        {part.strip() for part in text.split(".") if len(part) > 30 and "secret" not in part} for text in texts
    ]
    for i, one in enumerate(sentences):
        for another in sentences[:i]:
            assert len(one) > 8 and len(one & another) <= 1  # by chance


def test_a_file(tokenizer, book):
    made = prompts(tokenizer, count=3, held_out=1, num_tokens=1000, file=book)
    texts = [tokenizer.decode(p) for p in made.train + made.held_out]
    lines = [{word for word in text.split() if word.isdigit() and len(word) < 7} for text in texts]
    assert all(len(each) > 20 for each in lines)
    assert all(len(one & other) <= 1 for i, one in enumerate(lines) for other in lines[:i])
    assert all(abs(len(p) / 1000 - 1) < 0.03 for p in made.train + made.held_out)
    with pytest.raises(ValueError, match=r"book\.txt: got \d+ tokens, wanted 200000 for 20 prompts of 10000"):
        prompts(tokenizer, count=19, held_out=1, num_tokens=10_000, file=book)


@pytest.mark.parametrize("change", [{"count": 0}, {"held_out": 0}, {"num_tokens": 100}])
def test_wrong_numbers(tokenizer, change):
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: got"):
        prompts(tokenizer, **{"count": 1, "held_out": 1, "num_tokens": 200, **change})
