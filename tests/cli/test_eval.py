"""clo-jax eval: a real run of a tiny model, tables, results files, pictures, wrong calls."""

import dataclasses
import json

import pytest

from clo_jax.bench import report
from clo_jax.cache import calibration
from clo_jax.cache.calibration_parts import Choice
from clo_jax.cli._eval_options import read_variants, split
from clo_jax.config import CloConfig
from tests import tiny, tiny_checkpoint
from tests.eval.longbench import sets
from tests.eval.planted import plant


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    small = dataclasses.replace(tiny.LLAMA, num_layers=2)
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"), small)


def test_ruler(run, checkpoint, tmp_path):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    args = (
        "eval", "ruler", checkpoint, "--attention", "clo", "--sparsity", "1", "--lengths", "640", "--samples", "2",
        "--tasks", "niah_single_1,niah_single_3,qa_2", "--batch", "2", "--folder", tmp_path / "kept",
        "--json", out, "--plot", picture,
    )  # fmt: skip
    first = run(*args)
    assert first.code == 0, first.err
    assert "niah_single_3" in first.out and "clo 100 %" in first.out
    assert "qa_2: left out, it needs --hotpot FILE" in first.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(out.read_text())
    report.validate(content)
    full, clo = content["rows"]
    assert (full["name"], clo["name"]) == ("full, 640 tokens", "clo 100 %, 640 tokens")
    # The whole budget is full attention: the same answers, so the same scores.
    assert clo["tasks"] == full["tasks"] and clo["loss"]["value"] == 0 and clo["attended"] == 1
    assert clo["rows_moved"] > 0 and full["loss"] is None
    assert clo["recall"] == full["recall"] == 1 and clo["mass_kept"] == pytest.approx(1)
    assert content["args"]["recall"] == 1
    policy = content["args"]["policies"]["clo 100 %"]
    assert policy["load"]["clo"]["sparsity"] == 1 and policy["described"]["retriever"] == "sign"
    assert "2 samples a task: intervals of means and losses say little" in first.err
    assert content["args"]["skipped"] == {"qa_2": "--hotpot FILE"} and content["args"]["chat"] is True
    again = run(*args)
    assert again.code == 0 and again.out == first.out
    answers = (tmp_path / "kept").glob("answers-*.jsonl")
    assert [len(path.read_text("utf-8").split("\n")) for path in answers] == [1 + 2 * (1 + 2 * 2) + 2 + 1]


def test_niah(run, checkpoint, tmp_path, monkeypatch):
    plant(monkeypatch, checkpoint)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = run(
        "eval", "niah", checkpoint, "--attention", "clo,exact", "--lengths", "480,512", "--depths", "0.5,1",
        "--samples", "1", "--folder", tmp_path / "kept", "--json", out, "--plot", picture,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "depth 0.5" in result.out and picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(out.read_text())["rows"]
    assert [row["length"] for row in rows] == [480, 512] * 3 and set(rows[0]["tasks"]) == {"depth 0.5", "depth 1"}


def test_longbench(run, checkpoint, tmp_path, monkeypatch):
    plant(monkeypatch, checkpoint).answer = "red"
    out = tmp_path / "out.json"
    result = run(
        "eval", "longbench", checkpoint, "--data", sets.write(tmp_path / "data"), "--tasks", "qasper,trec",
        "--attention", "clo", "--lengths", "800", "--folder", tmp_path / "kept", "--json", out,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "qasper, 800 tokens: 1 texts have lost their middle" in result.err
    content = json.loads(out.read_text())
    full, clo = content["rows"]
    assert full["tasks"]["qasper"]["value"] == 50 and full["tasks"]["qasper"]["samples"] == 2
    assert full["tasks"]["trec"]["value"] == 0 and clo["loss"]["value"] == 0
    assert content["args"]["cut"] == {"qasper, 800 tokens": 1} and "lose their middle" in content["args"]["truncation"]


def test_ppl(run, checkpoint, tmp_path, monkeypatch):
    plant(monkeypatch, checkpoint)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = run(
        "eval", "ppl", checkpoint, "--attention", "clo", "--sparsity", "1", "--lengths", "256", "--tokens", "33",
        "--json", out, "--plot", picture,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "clo 100 %" in result.out and "mean KL" in result.out and picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(out.read_text())
    report.validate(content)
    full, clo = content["rows"]
    assert full["kl"]["mean"] == 0 and clo["control"] == full["value"] > 1
    assert len(clo["kl"]["by_token"]) == 32 and clo["kl"]["mean"] > 0.1 and clo["attended"] == 1
    # Of all tokens (a budget of 100 %) the planted model attends to one, that has three quarters of the mass.
    assert full["recall"] == 1 and clo["recall"] == pytest.approx(1 / 240, rel=0.1)
    assert clo["mass_kept"] == pytest.approx(0.75) and content["args"]["recall_tokens"] == 32
    assert content["args"]["text"] == "generated"


@pytest.mark.parametrize(
    "args, named",
    [
        (["--tasks", "niah"], "--tasks: got 'niah', wanted niah_single_1, niah_single_2"),
        (["--lengths", "1k"], "--lengths: got '1k', wanted integers with commas between them"),
        (["--sparsity", "10%"], "--sparsity: got '10%', wanted numbers"),
        (["--attention", "dense"], "--attention: got 'dense', wanted full, clo"),
        (["--lengths", "8192"], "lengths: got 8192, wanted 1 to 4096"),
        (["--samples", "0"], "samples: got 0"),
        (["--tasks", "vt", "--lengths", "256"], "10 of 10 prompts are longer than asked"),
        (["--haystack", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_calls_are_named(run, checkpoint, tmp_path, args, named):
    result = run("eval", "ruler", checkpoint, "--folder", tmp_path, "--samples", "10", *args)
    assert result.code in (1, 2) and named in result.err


def test_lists():
    assert split("--lengths", "1024, 4096,", int) == [1024, 4096]
    assert split("--attention", "", str) == []


def test_the_calibration_chooses_what_the_flags_leave_open(checkpoint):
    folder = checkpoint.parent / "calibration"
    if not folder.exists():
        calibration.update(folder, Choice("hata", 128, "a test"), provenance={})
    loading = {"calibration": str(folder)}
    (_, clo) = read_variants(str(checkpoint), "clo", "0.1", None, **loading)
    assert clo.load == {"attention": "clo", "clo": CloConfig(retriever="hata", hash_bits=128), **loading}
    (_, clo) = read_variants(str(checkpoint), "clo", "0.1", None, **loading, retain=2.0)
    assert clo.load["clo"] == CloConfig(retain=2.0)
    (_, clo) = read_variants(str(checkpoint), "clo", "0.1", None, calibration="none")
    assert clo.load == {"attention": "clo", "clo": CloConfig(), "calibration": None}
