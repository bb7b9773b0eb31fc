"""clo-jax calibrate on a tiny checkpoint: parts, provenance, what is picked up afterwards, wrong calls."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest

from clo_jax.cache import calibration
from clo_jax.calibrate import parts
from clo_jax.calibrate import run as runs
from clo_jax.calibrate.hashing import HashSettings
from clo_jax.calibrate.importance import GateSettings
from clo_jax.config import CloConfig
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
    monkeypatch.setattr(parts, "GateSettings", functools.partial(GateSettings, **small))


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
    monkeypatch.setattr(parts.costs_lib, "layer_seconds", lambda *args: 1e-3)
    file = tmp_path / "heads.tsv"
    np.savetxt(file, np.full((3, 2), 0.5), delimiter="\t")
    assert run("calibrate", checkpoint, "--importance", file).code == 0
    result = run("calibrate", checkpoint, "--costs", "--batch", "1", "--batch", "2", "--context", "128")
    assert result.code == 0, result.err
    found = calibration.read(checkpoint / "calibration")
    assert list(found.parts()) == ["importance", "costs"]
    assert found.costs.layer_times == ((1, 128, 1e-3), (2, 128, 1e-3))


def test_an_interrupted_run_is_continued(run, checkpoint, monkeypatch):
    gates = parts.optimise_gates

    def interrupted(*args, progress, **options):
        def step(done):
            progress(done)
            if done.step == 2:
                raise RuntimeError("the power went out")

        return gates(*args, progress=step, **options)

    arguments = ["calibrate", checkpoint, "--importance", "gates", "--small"]
    assert run(*arguments).code == 0
    whole = calibration.read(checkpoint / "calibration").importance.scores
    monkeypatch.setattr(parts, "optimise_gates", interrupted)
    assert "the power went out" in run(*arguments).err
    assert (checkpoint / "calibration" / parts.STATE_FILE).exists()
    steps = []

    def counted(*args, progress, **options):
        return gates(*args, progress=lambda done: (steps.append(done.step), progress(done)), **options)

    monkeypatch.setattr(parts, "optimise_gates", counted)
    assert run(*arguments, "--resume").code == 0
    assert steps == [3]
    np.testing.assert_array_equal(calibration.read(checkpoint / "calibration").importance.scores, whole)


def model(config, small):
    return parts.Model(config, None, None, CloConfig(), small, seed=7, resume=False)


def test_prompts_fit_the_model():
    settings = parts.gate_settings(model(tiny.LLAMA, False), {"rate": 0.5})
    assert (settings.lengths, settings.seed, settings.steps, settings.rate) == ((700,), 7, 3, 0.5)
    short = dataclasses.replace(tiny.LLAMA, max_position_embeddings=600)
    assert parts.gate_settings(model(short, False), {}).lengths == (570,)
    short = dataclasses.replace(tiny.LLAMA, max_position_embeddings=1000)
    assert model(short, True).lengths(500, 900, 1500) == (500, 900)
    with pytest.raises(ValueError, match="parts: got none"):
        runs.calibrate("nowhere", runs.Parts(), small=True)


def test_all_parts_follow_each_other(run, checkpoint, monkeypatch):
    """Hash functions and similarity in their small form, on prompts that the tiny tokenizer makes long."""
    monkeypatch.setattr(parts.costs_lib, "layer_seconds", lambda *args: 1e-3)
    kinds = [HashSettings("sign", 32, steps=25, keys=64), HashSettings("hata", 32, steps=25, keys=64)]
    monkeypatch.setattr(parts, "hash_settings", lambda model: kinds)
    monkeypatch.setattr(parts.Model, "lengths", lambda self, *wanted: (700,))
    # Where a token is a byte, few texts come within 1 % of so short a length: this seed's do.
    monkeypatch.setattr(parts, "_SIMILARITY_SEED", 1)
    result = run("calibrate", checkpoint, "--small", "--context", "128")
    assert result.code == 0, result.err
    found = calibration.read(checkpoint / "calibration")
    assert set(found.parts()) == {
        "importance", "hash-sign-32", "hash-hata-32", "choice", "similarity", "trace", "costs"
    }  # fmt: skip
    assert found.similarity.settings["head_scores"] == "measured (gates)"
    assert found.similarity.settings["clo"]["hash_bits"] == 32
    assert sorted(path.name for path in (checkpoint / "calibration").iterdir() if "partial" in path.name) == []
    with LLM.load(checkpoint, max_context=256, planner="paper") as llm:
        answer = llm.generate(tiny.prompt(100), max_new_tokens=6, ignore_eos=True)[0]
    # Keys of random weights leave `sign` nothing to gain, so that its codes are not trained ones, and says so.
    assert {part.retriever: part.trained for part in found.hash_weights} == {"sign": False, "hata": True}
    assert answer.metrics.retriever == {"sign": "sign", "hata": "hata (trained)"}[found.choice.retriever]
    assert answer.metrics.planner == "paper" and answer.metrics.resident_heads >= 2


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
