"""The bench of RULER accuracy: which tasks count, losses by pairs of samples, goals; on planted answers."""

import json

import numpy as np
import pytest

from clo_jax.bench import accuracy
from clo_jax.config import CloConfig
from clo_jax.eval.answers import Answer, Key

ABLE, UNABLE = (64, "niah_single_1"), (64, "vt")


def given(points, cell=ABLE, moved=None):
    """Answers with these scores."""
    key = Key("any", "", *cell, 0)
    answers = [Answer(key, "text", 11, "stop", 0.5, moved, 0.1, 0.2) for _ in points]
    return accuracy.Answers({cell: np.array(points, np.float64)}, {cell: answers})


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Runs `main` with full attention and each way answering as told; ways that nothing is told of lose nothing.
    Returns the rows by name, and who was asked how many samples of which cells."""
    asked = []

    def run(told, *more):
        def answers(self, variant, samples, cells):
            asked.append((variant.name, samples, list(cells)))
            if variant.name == "full":
                low = given([0.0, 100.0, 100.0, 0.0], UNABLE)
                able = given([100.0, 100.0, 100.0, 0.0])
                return accuracy.Answers(able.scores | low.scores, able.given | low.given)
            return given(told.get(variant.name, [100.0, 100.0, 100.0, 0.0][:samples]), moved=20)

        monkeypatch.setattr(accuracy.Run, "answers", answers)
        monkeypatch.setattr(accuracy, "shipped", lambda checkpoint: CloConfig())
        out = tmp_path / "accuracy.json"
        accuracy.main(
            ["model", "--lengths", "64", "--samples", "4", "--others", "2", "--tasks", "niah_single_1,vt", "--out"]
            + [str(out), *more]
        )
        return {row["name"]: row for row in json.loads(out.read_text())["rows"]} if out.exists() else None

    run.asked = asked
    return run


def test_only_what_full_attention_can_do_counts(planted):
    rows = planted({})
    assert rows["score, full, 64 tokens"]["value"] == 75
    assert rows["score, full, 64 tokens"]["tasks"] == {"niah_single_1": 75, "vt": 50}
    assert {tuple(cells) for name, _, cells in planted.asked if name != "full"} == {(ABLE,)}
    samples = {name: n for name, n, _ in planted.asked}
    assert samples["clo 10 %"] == samples["clo 2 %"] == 4 and samples["infinigen 10 %"] == samples["exact 2 %"] == 2


def test_losses_are_of_the_samples_that_both_answered(planted):
    rows = planted(
        {"clo 10 %": [100.0, 0.0, 100.0, 0.0], "infinigen 10 %": [0.0, 0.0], "retroinfer 10 %": [100.0, 100.0]}
    )
    assert rows["loss, clo 10 %"]["value"] == 25 and not rows["loss, clo 10 %"]["met"]
    assert rows["loss, clo 5 %"]["value"] == 0 and "goal" not in rows["loss, clo 5 %"]
    assert rows["score, infinigen 10 %, all lengths"]["control"] == 100  # full attention on those two
    assert rows["infinigen less clo, 10 %"]["value"] == -50 and rows["infinigen less clo, 10 %"]["met"]
    assert rows["retroinfer less clo, 10 %"]["value"] == 50 and not rows["retroinfer less clo, 10 %"]["met"]
    assert "goal" not in rows["pqcache less clo, 10 %"] and "goal" not in rows["infinigen less clo, 5 %"]


def test_costs_are_of_a_decode_step(planted):
    row = planted({})["score, clo 10 %, all lengths"]
    assert row["rows_moved_a_step"] == 2 and row["hit_rate"] == 0.5 and row["selected"] == 0.1


def test_hit_rates_count_by_decode_steps():
    key, points = Key("any", "", *ABLE, 0), {ABLE: np.array([100.0, 100.0])}
    answers = [Answer(key, "text", 2, "stop", 0.0, 30, 0.1, 0.2), Answer(key, "text", 10, "stop", 0.5, 10, 0.1, 0.2)]
    found = {"clo 10 %": (accuracy.ways(CloConfig(), 2, 2)[0], accuracy.Answers(points, {ABLE: answers}))}
    row = {row.name: row for row in accuracy.rows([ABLE], given([100.0, 100.0]), found)}["score, clo 10 %, 64 tokens"]
    assert row.more["hit_rate"] == pytest.approx(0.45) and row.more["rows_moved_a_step"] == 4


def test_one_way_alone_writes_nothing(planted):
    assert planted({}, "--only", "clo 5 %") is None
    assert [name for name, _, _ in planted.asked] == ["full", "clo 5 %"]


def test_a_way_may_answer_fewer_samples(planted):
    rows = planted({}, "--fewer", "infinigen 5 %=1", "--fewer", "clo 2 %=3")
    samples = {name: n for name, n, _ in planted.asked}
    assert (samples["infinigen 5 %"], samples["infinigen 2 %"], samples["clo 2 %"], samples["clo 5 %"]) == (1, 2, 3, 4)
    assert rows["score, infinigen 5 %, all lengths"]["samples"] == 1


@pytest.mark.parametrize("number", ["3", "0", "few"])
def test_no_way_answers_more_than_it_is_asked(planted, capsys, number):
    with pytest.raises(SystemExit):
        planted({}, "--fewer", f"infinigen 5 %={number}")
    assert f"--fewer: got '{number}' for infinigen 5 %, wanted 1 to 2" in capsys.readouterr().err


def test_unknown_names_are_refused(planted, capsys):
    with pytest.raises(SystemExit):
        planted({}, "--only", "magic 10 %")
    assert "got 'magic 10 %', wanted one of: clo 10 %, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        planted({}, "--tasks", "magic")
    assert "--tasks: got 'magic'" in capsys.readouterr().err
