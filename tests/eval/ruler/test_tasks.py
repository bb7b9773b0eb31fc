"""The 13 generators: lengths, seeds, answers in the prompt and where they stand."""

import collections
import json
import re

import pytest

from clo_jax.eval.ruler import TASKS
from clo_jax.eval.ruler.needles import Needles
from clo_jax.eval.samples import DoesNotFit, GeneratedTask, PromptFormat, make_sample
from clo_jax.eval.sources import Sources
from tests.eval.fakes import Words
from tests.eval.test_sources import HOTPOT, SQUAD

PROMPTS = PromptFormat(Words(), chat=True)
ANSWER_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    (folder / "squad").write_text(json.dumps(SQUAD))
    (folder / "hotpot").write_text(json.dumps(HOTPOT))
    return Sources.read(squad=folder / "squad", hotpot=folder / "hotpot")


def sample(name, sources=None, index=0, length=1200, seed=0):
    return make_sample(TASKS[name], index, length, PROMPTS, sources or Sources(), seed)


def test_names_answer_lengths_and_metrics():
    assert list(TASKS) == [
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
    ]  # fmt: skip
    for name, task in TASKS.items():
        assert task.answer_tokens == ANSWER_TOKENS.get(name, 128)
        assert task.metric.__name__ == ("string_match_part" if name.startswith("qa") else "string_match_all")


@pytest.mark.parametrize("name", TASKS)
def test_length_seed_and_answers(name, sources):
    one = sample(name, sources)
    room = 1200 - TASKS[name].answer_tokens
    assert one.prompt_tokens == len(PROMPTS.encode(one.text, one.prefix)) <= room
    if not name.startswith("qa"):  # there all documents are in the prompt before it is full
        assert one.prompt_tokens > 0.9 * room
        assert sample(name, sources, seed=1) != one
    assert sample(name, sources) == one and sample(name, sources, index=1) != one
    assert all(output in one.text for output in one.outputs)
    assert not one.prefix.endswith(" ") and not any(output in one.prefix for output in one.outputs)
    assert TASKS[name].metric(f"{one.prefix} {', '.join(one.outputs)}", one.outputs) == 1


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
@pytest.mark.parametrize("seed", range(3))
def test_needles_stand_where_the_sample_says(name, seed):
    found = sample(name, seed=seed)
    number = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
    assert len(found.depths) == number and sorted(found.depths) == list(found.depths)
    assert len(found.outputs) == (4 if name in ("niah_multivalue", "niah_multiquery") else 1)
    hay = found.text.split("\n\n", 1)[1].rpartition("\n\n")[0]
    for output in found.outputs:
        assert hay.count(output) == 1
        at = hay.index(output) / len(hay)
        assert min(abs(at - depth) for depth in found.depths) < 0.08


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_at_an_asked_depth(depth):
    task = GeneratedTask("grid", 32, max, Needles("prose", depth=depth))
    found = make_sample(task, 0, 2000, PROMPTS, Sources(), 0)
    before = PROMPTS.encode(found.text[: found.text.index(found.outputs[0])], "")
    assert abs(len(before) / found.prompt_tokens - depth) < 0.05


def test_kinds_of_keys_values_and_hay():
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert re.fullmatch(r"[1-9]\d{6}", sample("niah_single_1").outputs[0])
    assert re.fullmatch(uuid, sample("niah_single_3").outputs[0])
    assert "The road is long." in sample("niah_single_1").text
    assert "The road is long." not in sample("niah_single_2").text
    needles = re.findall(r"The secret number for ([a-z]+-[a-z]+) is \d{7}\.", sample("niah_multikey_2").text)
    assert len(set(needles)) == len(needles) > 50
    needles = re.findall(rf"The secret code for {uuid} is {uuid}\.", sample("niah_multikey_3").text)
    assert len(needles) > 20
    text = sample("niah_multivalue").text
    assert len({key for key in re.findall(r"The secret number for (\S+) is", text)}) == 1
    text = sample("niah_multiquery").text
    assert len(re.findall(r"The secret number for (\S+) is", text)) == 4
    assert "What is the secret number" in sample("niah_multikey_1").text
    assert "What are all the secret numbers" in text


def test_prose_of_the_user(tmp_path):
    (tmp_path / "text.txt").write_text("My own words. More of them! And the end?")
    text = sample("niah_single_2", Sources.read(text=tmp_path / "text.txt")).text
    assert text.count("My own words.") > 20


def test_variables_follow_one_chain():
    found = sample("vt")
    question = found.text.rpartition("\n\n")[0].rpartition("Follow the assignments")[2]
    chain = re.findall(r"VAR (\w{5}) = (?:VAR )?(\w{5})\.", question)
    assert [name for name, _ in chain] == list(found.outputs) and len(found.outputs) == 5
    assert [before for _, before in chain[1:]] == list(found.outputs[:4])
    assert chain[0][1] in found.prefix and chain[0][1].isdigit()
    assert found.text.count("VAR") == 2 * 9  # the example has a chain of its own


@pytest.mark.parametrize("length, often, seldom", [(1200, 6, 1), (4096, 30, 3)])
def test_common_words_are_as_common_as_asked(length, often, seldom):
    found = sample("cwe", length=length)
    listed = found.text.rpartition("Question:")[0].rpartition("The following")[2]
    counts = collections.Counter(re.findall(r"\d+\. ([a-z-]+)", listed))
    assert {word for word, n in counts.items() if n == often} == set(found.outputs) and len(found.outputs) == 10
    assert set(counts.values()) == {often, seldom}
    assert f"{found.prefix} 1. " in found.text  # the example's answer


@pytest.mark.parametrize("length", [512, 1200, 4096])
def test_frequent_words_are_ranks_two_to_four(length):
    found = sample("fwe", length=length)
    words = found.text.split("\n\n")[1].split(" ")
    (noise, _), *top = collections.Counter(words).most_common(5)
    assert noise == "..." and [word for word, _ in top[:3]] == list(found.outputs)
    assert top[2][1] > top[3][1]
    assert all(re.fullmatch(r"[a-z]{6}", word) for word in set(words) - {"..."})


def test_documents_of_questions(sources):
    found = sample("qa_1", sources)
    assert "Question: Who built the mill?" in found.text and found.outputs == ("Ada",)
    assert all(document in found.text for document in sources.squad.documents)
    first = [sample("qa_1", sources, seed=seed).text.split("\n")[3] for seed in range(8)]
    assert len(set(first)) > 1  # shuffled
    assert "Mill\nOld." in sample("qa_2", sources).text


def test_related_documents_come_first(sources):
    few = make_sample(TASKS["qa_2"], 0, 114, PROMPTS, sources, 0).text
    assert "Barn\n" in few and "Mill\n" in few and "Sea\n" not in few


def test_more_samples_than_questions_and_too_short_a_length(sources):
    with pytest.raises(ValueError, match="samples: got more than 2, wanted at most the questions of the squad file"):
        sample("qa_1", sources, index=2)
    with pytest.raises(DoesNotFit, match="vt, sample 0"):
        sample("vt", length=128)
