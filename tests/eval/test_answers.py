"""The file of answers: continued, repaired, told apart."""

import json

import pytest

from clo_jax.errors import CloError
from clo_jax.eval.answers import Answer, AnswerFile, Key
from clo_jax.eval.selection import Kept


def answer(index, text="found\nit \u2028", **more):
    return Answer(Key("clo 10 %", "abc", 1024, "vt", index), text, 7, "stop", **more)


def test_answers_come_back(tmp_path):
    file = AnswerFile(tmp_path / "new", {"seed": 1})
    file.add([answer(0), answer(1, "", hit_rate=0.5, rows_moved=3.5, selected=0.1, attended=0.2)])
    file.add([answer(2)])
    again = AnswerFile(tmp_path / "new", {"seed": 1})
    assert again.answers == file.answers and list(again.answers.values()) == [
        answer(0), answer(1, "", hit_rate=0.5, rows_moved=3.5, selected=0.1, attended=0.2), answer(2),
    ]  # fmt: skip
    assert json.loads(file.path.read_text("utf-8").split("\n")[0]) == {"setup": {"seed": 1}}


def test_what_a_model_said_of_itself_comes_back(tmp_path):
    file = AnswerFile(tmp_path, {})
    for _ in range(2):
        file.describe("clo 10 %", "abc", {"checkpoint": "/somewhere", "retriever": "sign"})
    file.add([answer(0)])
    again = AnswerFile(tmp_path, {})
    assert again.described == {("clo 10 %", "abc"): {"retriever": "sign"}} and len(again.answers) == 1
    assert len(again.path.read_text("utf-8").splitlines()) == 3


def test_what_a_policy_keeps_comes_back(tmp_path):
    file, kept = AnswerFile(tmp_path, {}), Kept(0.75, 0.9, 16)
    file.keep(answer(0).key, kept)
    file.add([answer(0)])
    again = AnswerFile(tmp_path, {})
    assert again.kept == file.kept == {answer(0).key: kept} and again.answers == file.answers


def test_another_setup_has_another_file(tmp_path):
    AnswerFile(tmp_path, {"seed": 1}).add([answer(0)])
    assert AnswerFile(tmp_path, {"seed": 2}).answers == {}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cut_last_line_is_dropped_and_the_next_answer_follows_cleanly(tmp_path):
    file = AnswerFile(tmp_path, {})
    file.add([answer(0), answer(1)])
    file.path.write_bytes(file.path.read_bytes()[:-9])
    again = AnswerFile(tmp_path, {})
    assert list(again.answers.values()) == [answer(0)]
    again.add([answer(1)])
    assert list(AnswerFile(tmp_path, {}).answers.values()) == [answer(0), answer(1)]


@pytest.mark.parametrize("kept", [0, 5])
def test_a_file_whose_first_line_was_cut_begins_anew(tmp_path, kept):
    file = AnswerFile(tmp_path, {"seed": 1})
    file.path.write_bytes(file.path.read_bytes()[:kept])
    AnswerFile(tmp_path, {"seed": 1}).add([answer(0)])
    assert list(AnswerFile(tmp_path, {"seed": 1}).answers.values()) == [answer(0)]
    assert json.loads(file.path.read_text("utf-8").split("\n")[0]) == {"setup": {"seed": 1}}


def test_a_damaged_line_is_named(tmp_path):
    file = AnswerFile(tmp_path, {})
    file.add([answer(0), answer(1)])
    file.path.write_text(file.path.read_text("utf-8").replace('"index": 0', '"number": 0'), "utf-8")
    with pytest.raises(CloError, match="line 2: not an answer") as error:
        AnswerFile(tmp_path, {})
    assert str(file.path) in str(error.value)
