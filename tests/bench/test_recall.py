"""The bench of the recall model: every policy is asked at the sparsity that its row names."""

import json

import jax
import jax.numpy as jnp
import pytest

from clo_jax.bench import recall
from clo_jax.eval.recall import chains, folder
from clo_jax.llm import LLM
from clo_jax.models import random_params
from tests.eval.recall.test_training import SMALL


def test_rows_of_a_length(tmp_path, monkeypatch):
    checkpoint = folder.write(SMALL, random_params(SMALL, jax.random.key(0), jnp.bfloat16), tmp_path / "model").path
    loaded, load = [], LLM.load
    monkeypatch.setattr(recall, "HOPS", 2)
    monkeypatch.setattr(LLM, "load", lambda *args, **given: loaded.append(given) or load(*args, **given))
    # What a model of random weights cannot know is put in its mouth, but for every second lookup of the others.
    monkeypatch.setattr(
        chains, "right", lambda asked, answer: [True, loaded[-1]["attention"] == "full"] if len(answer) == 8 else []
    )
    out = tmp_path / "recall.json"
    arguments = [str(checkpoint), "--lengths", "120", "--attention", "clo,exact", "--sparsity", "0.1,0.5"]
    arguments += ["--dtype", "float32", "--folder", str(tmp_path / "answers"), "--out", str(out)]
    recall.main([*arguments, "--samples", "2"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["value"] for row in rows] == [1.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert rows[0]["met"] and [row.get("met") for row in rows[1:]] == [False, None, None, None, None]
    assert [row["lookups"] for row in rows] == [4] * 6
    used = [given["rival"].sparsity if "rival" in given else given["clo"].sparsity for given in loaded[1:]]
    assert used == [row["sparsity"] for row in rows[1:]] == [0.1, 0.5, 0.1, 0.5, 0.1]
    assert [given["attention"] for given in loaded] == ["full", "clo", "clo", "exact", "exact", "clo"]
    assert [given["clo"].guess_from for given in loaded if "clo" in given] == ["attention", "attention", "input"]


def test_answers_are_kept(tmp_path, monkeypatch):
    checkpoint = folder.write(SMALL, random_params(SMALL, jax.random.key(0), jnp.bfloat16), tmp_path / "model").path
    arguments = [str(checkpoint), "--lengths", "120", "--attention", "clo", "--sparsity", "0.1", "--vary", ""]
    arguments += ["--dtype", "float32", "--folder", str(tmp_path / "answers")]
    outs = [tmp_path / f"{n}.json" for n in range(3)]
    recall.main([*arguments, "--samples", "2", "--out", str(outs[0])])
    recall.main([*arguments, "--samples", "3", "--batch", "2", "--out", str(outs[1])])
    monkeypatch.setattr(LLM, "load", lambda *args, **given: pytest.fail("asked again"))
    recall.main([*arguments, "--samples", "3", "--out", str(outs[2])])
    rows = [json.loads(out.read_text())["rows"] for out in outs]
    assert [row["lookups"] for row in rows[0]] == [2 * recall.HOPS] * 2 and rows[1] == rows[2]
    assert [row["lookups"] for row in rows[1]] == [3 * recall.HOPS] * 2
    (answers,) = (tmp_path / "answers").glob("*.jsonl")
    assert len(answers.read_text().splitlines()) == 1 + 2 * 3


def test_samples_of_each_length(tmp_path):
    checkpoint = folder.write(SMALL, random_params(SMALL, jax.random.key(0), jnp.bfloat16), tmp_path / "model").path
    out = tmp_path / "recall.json"
    arguments = [str(checkpoint), "--lengths", "64,120", "--samples", "2,1", "--attention", "full", "--sparsity", "0.1"]
    recall.main([*arguments, "--dtype", "float32", "--folder", str(tmp_path), "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["length"], row["lookups"]) for row in rows] == [(64, 2 * recall.HOPS), (120, recall.HOPS)]


def test_numbers_of_samples_that_fit_no_lengths_are_named(capsys):
    with pytest.raises(SystemExit):
        recall.main(["nowhere", "--lengths", "64,120", "--samples", "1,2,3"])
    assert "--samples: got 1,2,3, wanted one number or one for each of --lengths 64,120" in capsys.readouterr().err


def test_an_unknown_policy_is_named(capsys):
    with pytest.raises(SystemExit):
        recall.main(["nowhere", "--attention", "magic"])
    assert "--attention: got 'magic'" in capsys.readouterr().err
