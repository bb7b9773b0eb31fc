"""The 21 sets: reading, prompts, truncation, which metric of which part of an answer."""

import sys
import types

import pytest

from clo_jax.eval import longbench
from clo_jax.eval.longbench.prompts import PROMPTS
from clo_jax.eval.samples import PromptFormat
from clo_jax.eval.sources import Sources
from clo_jax.text import Tokenizer
from tests.eval.longbench import sets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return sets.write(tmp_path_factory.mktemp("longbench"))


@pytest.fixture
def tasks(folder):
    return {task.name: task for task in longbench.read(folder)}


@pytest.fixture(scope="module")
def prompts(checkpoint):
    return PromptFormat(Tokenizer.from_folder(checkpoint), True)


def samples(task, length, prompts, number=9):
    return task.samples(number, length, prompts, Sources(), 0, None, lambda n: None)


def test_all_sets_have_a_metric_a_prompt_and_the_official_answer_length():
    assert len(longbench.SETS) == 21 and set(PROMPTS) == set(longbench.SETS)
    by_length = {n: {name for name, kind in longbench.SETS.items() if kind.answer_tokens == n} for n in (32, 128, 512)}
    assert by_length[512] == {"gov_report", "qmsum", "multi_news", "vcsum"}
    assert by_length[128] == {"narrativeqa", "qasper", "dureader", "samsum"}
    assert len(by_length[32]) == 7 and {kind.answer_tokens for kind in longbench.SETS.values()} == {32, 64, 128, 512}
    for name, text in PROMPTS.items():
        assert "CONTEXT" in text.format_map({"context": "CONTEXT", "input": "ASKED"})
        assert ("ASKED" in text.format_map({"context": "", "input": "ASKED"})) == (
            name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        )
    bare = {name for name, kind in longbench.SETS.items() if not kind.chat}
    assert bare == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def test_prompts_in_the_template_or_bare(tasks, prompts):
    (qa, _), (code,) = samples(tasks["qasper"], 2000, prompts), samples(tasks["lcc"], 2000, prompts)
    assert qa.chat and not qa.cut and qa.outputs == ("red", "It is red") and qa.text.endswith("mill?\nAnswer:")
    assert qa.prompt_tokens == len(prompts.encode(qa.text, "")) == len(qa.text) + 3  # the template's
    assert not code.chat and code.prompt_tokens == len(code.text)
    assert len(samples(tasks["qasper"], 2000, prompts, number=1)) == 1
    assert qa.task.startswith("qasper ") and len(qa.task) == len("qasper ") + 8


def test_long_texts_lose_their_middle(tasks, prompts):
    whole = samples(tasks["qasper"], 2000, prompts)[0].text
    cut, short = samples(tasks["qasper"], 800, prompts)
    room = 800 - 128
    assert cut.cut and room - 4 <= cut.prompt_tokens == len(cut.text) + 3 <= room
    half = len(cut.text) // 2
    assert whole.startswith(cut.text[:half]) and whole.endswith(cut.text[half:])
    assert not short.cut and short.prompt_tokens <= room
    assert samples(tasks["qasper"], 130, prompts) == [None, None]  # the answer alone leaves no room


def test_metrics_of_sets(tasks, monkeypatch):
    assert tasks["qasper"].metric("red\nand more", ["red"]) == pytest.approx(0.5)  # all of the answer
    assert tasks["trec"].metric("date\nperson", ["date"]) == 1  # the first line
    assert tasks["trec"].metric("date or person", ["date"]) == 0.5
    assert tasks["passage_retrieval_zh"].metric("段落1", ["段落1"]) == 1
    assert tasks["lcc"].metric("\ty = 2", ["y = 2"]) == pytest.approx(0.91)
    words = types.SimpleNamespace(lcut=lambda text: list(text), setLogLevel=lambda level: None)
    monkeypatch.setitem(sys.modules, "jieba", words)
    longbench._jieba.cache_clear()
    assert tasks["multifieldqa_zh"].missing(Sources()) is None
    assert tasks["multifieldqa_zh"].metric("红", ["红色"]) == pytest.approx(2 / 3)
    monkeypatch.setitem(sys.modules, "jieba", None)
    longbench._jieba.cache_clear()
    assert tasks["multifieldqa_zh"].missing(Sources()) == "pip install 'clo-jax[longbench]'"
    assert tasks["passage_retrieval_zh"].missing(Sources()) is None
    longbench._jieba.cache_clear()


def test_sets_by_name_and_in_the_official_order(folder):
    assert [task.name for task in longbench.read(folder)] == [
        "qasper", "multifieldqa_zh", "trec", "passage_retrieval_zh", "lcc",
    ]  # fmt: skip
    assert [task.name for task in longbench.read(folder, ["lcc", "trec", "lcc"])] == ["lcc", "trec"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not a set of LongBench: JSONDecodeError"),
        ('{"context": "a", "input": "b"}', "not a set of LongBench: KeyError 'answers'"),
        ('{"context": "a", "input": "b", "answers": [], "all_classes": null}', "got an empty answer"),
        ("\n", "got no row"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    (tmp_path / "lcc.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        longbench.read(tmp_path)
    assert "lcc.jsonl" in str(error.value)


def test_wrong_calls_are_named(tmp_path, folder):
    with pytest.raises(ValueError, match="--tasks: got 'poems', wanted narrativeqa, qasper"):
        longbench.read(folder, ["poems"])
    with pytest.raises(ValueError, match="musique.jsonl: not a set of LongBench: FileNotFoundError"):
        longbench.read(folder, ["musique"])
    with pytest.raises(ValueError, match="got no set of LongBench, wanted files such as qasper.jsonl"):
        longbench.read(tmp_path)
