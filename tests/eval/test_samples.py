"""Fitting drafts to a length, and keeping samples in a folder."""

import dataclasses
import itertools
import random

import pytest

from clo_jax.errors import CloError
from clo_jax.eval import samples
from clo_jax.eval.metrics import string_match_all
from clo_jax.eval.samples import Draft, GeneratedTask, PromptFormat, load_or_make, make_sample
from clo_jax.eval.sources import Sources
from tests.eval.fakes import Words

PROMPTS = PromptFormat(Words(), chat=True)


def counting(step=1, start=0, jump=None, name="counting"):
    """A task of `start` + `step` words a unit; from size `jump` on twice as many."""

    def draft(rng, size, length, sources, index):
        number = start + step * size * (2 if jump and size >= jump else 1)
        return Draft(" ".join(["word"] * number), f"answer {rng.randrange(10**6)}", ("x",))

    return GeneratedTask(name, 10, string_match_all, draft)


@pytest.mark.parametrize("length", [60, 500, 5000])
@pytest.mark.parametrize("task", [counting(), counting(7, 5), counting(jump=40), counting(3, jump=300)])
def test_prompts_fill_the_length_and_never_exceed_it(task, length):
    sample = make_sample(task, 0, length, PROMPTS, Sources(), 0)
    assert sample.prompt_tokens == len(PROMPTS.encode(sample.text, sample.prefix)) <= length - 10
    around = len(PROMPTS.encode("", "answer 1"))
    sizes = (len(task.draft(random.Random(0), size, 0, None, 0).text) // 5 + 1 + around for size in range(1, length))
    exact = next(last for last, following in itertools.pairwise(sizes) if following > length - 10)
    assert sample.prompt_tokens >= exact - max(2 * 7, length // 200)


def test_few_prompts_are_tried():
    tried = []
    task = counting(20)

    def draft(*args):
        tried.append(args[1])
        return task.draft(*args)

    make_sample(dataclasses.replace(task, draft=draft), 0, 100_000, PROMPTS, Sources(), 0)
    assert len(tried) <= 5


def test_the_largest_size_is_respected():
    task = dataclasses.replace(counting(), most=lambda sources: 12)
    assert len(make_sample(task, 0, 500, PROMPTS, Sources(), 0).text.split()) == 12
    task = dataclasses.replace(counting(), most=lambda sources: 1)
    assert make_sample(task, 0, 500, PROMPTS, Sources(), 0).text == "word"


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(samples.DoesNotFit, match="counting, sample 3: .* 109 tokens, with 10 .* the 100 asked for"):
        make_sample(counting(start=100), 3, 100, PROMPTS, Sources(), 0)


def test_chat_and_bare_prompts():
    assert PROMPTS.encode("a bb", "ccc") == [1, 4, 1, 1, 2, 1, 9, 1, 3]
    bare = PromptFormat(Words(), chat=False)
    assert bare.encode("a bb", "ccc") == [1, 1, 2, 1, 3]
    assert bare.digest() != PROMPTS.digest() != PromptFormat(Words(name="other"), True).digest()


def test_kept_samples_are_read_continued_and_told_apart(tmp_path):
    made = []
    task = counting()

    def get(number, length=100, seed=0, task=task, prompts=PROMPTS):
        made.clear()
        return load_or_make(task, number, length, prompts, Sources(), seed, tmp_path, made.append)

    three = get(3)
    assert len(made) == 3 and get(3) == three and made == []
    five = get(5)
    assert len(made) == 2 and five[:3] == three and len({sample.prefix for sample in five}) == 5
    assert get(2) == three[:2] and get(5) == five and made == []
    for other in (
        {"length": 90}, {"seed": 1}, {"task": counting(name="other")},
        {"prompts": PromptFormat(Words(), False)}, {"prompts": PromptFormat(Words(name="other"), True)},
    ):  # fmt: skip
        assert len(get(3, **other)) == len(made) == 3
    assert not list(tmp_path.glob("*.partial"))


def test_any_character_comes_back(tmp_path):
    text = "one\u2028two\x85\r\n\U0001f600"
    task = GeneratedTask(
        "odd", 1, string_match_all, lambda *args: Draft(text, "it is", (text,), (0.5,)), most=lambda sources: 1
    )
    made = load_or_make(task, 2, 100, PROMPTS, Sources(), 0, tmp_path)
    assert load_or_make(task, 2, 100, PROMPTS, Sources(), 0, tmp_path) == made and made[0].text == text


def test_samples_that_do_not_fit_are_kept_as_such(tmp_path):
    task = counting(start=100)
    assert load_or_make(task, 2, 100, PROMPTS, Sources(), 0, tmp_path) == [None, None]
    assert load_or_make(task, 2, 100, PROMPTS, Sources(), 0, tmp_path) == [None, None]


def test_a_damaged_file_is_named(tmp_path):
    load_or_make(counting(), 2, 100, PROMPTS, Sources(), 0, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-20])
    with pytest.raises(CloError, match="not a file of samples") as error:
        load_or_make(counting(), 2, 100, PROMPTS, Sources(), 0, tmp_path)
    assert str(path) in str(error.value)
