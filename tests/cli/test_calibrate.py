"""clo-jax calibrate on a tiny checkpoint: parts, provenance, what is picked up afterwards, wrong calls."""

import json
import shutil

import numpy as np
import pytest

from clo_jax.cache import calibration
from clo_jax.calibrate import run as runs
from clo_jax.calibrate.importance import GateSettings
from clo_jax.llm import LLM
from tests import tiny, tiny_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def checkpoint(made):
    yield made
    shutil.rmtree(made / "calibration", ignore_errors=True)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Prompts that are short for a tokenizer of single bytes, and few."""
    small = dict(sink=4, recent=16, steps=3, rate=0.1, needles=1, words=1, lengths=(700,), examples=2)
    monkeypatch.setattr(GateSettings, "small", classmethod(lambda cls, **changes: cls(**{**small, **changes})))


def test_gates_are_written_and_picked_up(run, checkpoint):
    result = run("calibrate", checkpoint, "--importance", "gates", "--small", "--per", "query", "--seed", "4", "--json")
    assert result.code == 0, result.err
    said = json.loads(result.out)
    assert said["parts"] == ["importance"] and said["figures"]["importance"]["mean"] < 1
    found = calibration.read(checkpoint / "calibration")
    assert found.importance.scores.shape == (3, 6) and found.importance.source == "gates"
    origin = found.provenance["importance"]
    assert (origin["seed"], origin["small"], origin["arguments"]["steps"]) == (4, True, 3)
    assert {"checkpoint_sha256", "prompts_sha256", "versions", "seconds", "device"} <= set(origin)
    assert [path.name for path in (checkpoint / "calibration").glob("*partial*")] == []
    with LLM.load(checkpoint, max_context=256) as llm:
        assert llm.describe()["head_scores"] == "measured (gates)"


def test_the_quick_estimate_says_what_it_is(run, checkpoint):
    result = run("calibrate", checkpoint, "--importance", "quick", "--small")
    assert result.code == 0, result.err
    assert "importance" in result.out
    found = calibration.read(checkpoint / "calibration").importance
    assert found.source == "quick estimate" and found.scores.max() == 1


def test_a_published_file_is_taken_over(run, checkpoint, tmp_path):
    file = tmp_path / "heads.tsv"
    np.savetxt(file, np.full((3, 2), 0.5), delimiter="\t")
    assert run("calibrate", checkpoint, "--importance", file).code == 0
    found = calibration.read(checkpoint / "calibration")
    assert found.importance.source == "duo-attention file"
    assert found.provenance["importance"]["file"] == "heads.tsv"
    np.savetxt(file, np.full((4, 2), 0.5), delimiter="\t")
    result = run("calibrate", checkpoint, "--importance", file)
    assert (
        result.code == 1 and "heads.tsv: scores: got shape (4, 2), wanted (3, 6) or (3, 2) of the model" in result.err
    )


def test_parts_are_kept_beside_each_other(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(runs.costs_lib, "layer_seconds", lambda *args: 1e-3)
    file = tmp_path / "heads.tsv"
    np.savetxt(file, np.full((3, 2), 0.5), delimiter="\t")
    assert run("calibrate", checkpoint, "--importance", file).code == 0
    result = run("calibrate", checkpoint, "--costs", "--batch", "1", "--batch", "2", "--context", "128")
    assert result.code == 0, result.err
    found = calibration.read(checkpoint / "calibration")
    assert list(found.parts()) == ["importance", "costs"]
    assert found.costs.layer_times == ((1, 128, 1e-3), (2, 128, 1e-3))


def test_an_interrupted_run_is_continued(run, checkpoint, monkeypatch):
    gates = runs.optimise_gates

    def interrupted(*args, progress, **options):
        def step(done):
            progress(done)
            if done.step == 2:
                raise RuntimeError("the power went out")

        return gates(*args, progress=step, **options)

    arguments = ["calibrate", checkpoint, "--importance", "gates", "--small"]
    assert run(*arguments).code == 0
    whole = calibration.read(checkpoint / "calibration").importance.scores
    monkeypatch.setattr(runs, "optimise_gates", interrupted)
    assert "the power went out" in run(*arguments).err
    assert (checkpoint / "calibration" / runs.STATE_FILE).exists()
    steps = []

    def counted(*args, progress, **options):
        return gates(*args, progress=lambda done: (steps.append(done.step), progress(done)), **options)

    monkeypatch.setattr(runs, "optimise_gates", counted)
    assert run(*arguments, "--resume").code == 0
    assert steps == [3]
    np.testing.assert_array_equal(calibration.read(checkpoint / "calibration").importance.scores, whole)


def test_prompts_fit_the_model():
    settings = runs.gate_settings(tiny.LLAMA, False, 7, {})
    assert (settings.lengths, settings.seed, settings.steps) == ((2000,), 7, 2000)
    with pytest.raises(ValueError, match="parts: got none"):
        runs.calibrate("nowhere", runs.Parts(), small=True)


@pytest.mark.parametrize(
    "args, code, named",
    [
        (["--importance", "nowhere.tsv"], 1, "nowhere.tsv: cannot be read"),
        (["--importance", "gates", "--small", "--per", "layer"], 2, "per: got 'layer'"),
        (["--importance", "gates", "--small", "--steps", "0"], 2, "steps: got 0"),
        (["--costs", "--context", "10"], 2, "context: got 10, wanted at least"),
    ],
)
def test_wrong_calls_are_named(run, checkpoint, args, code, named):
    result = run("calibrate", checkpoint, *args)
    assert (result.code, named in result.err) == (code, True), result.err
