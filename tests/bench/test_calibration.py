"""The bench of a calibration: rows for each kind of code, against the same without training; times; the choice."""

import json

import numpy as np
import pytest

from clo_jax.bench import calibration, report
from clo_jax.calibrate.hash_training import SHARES
from tests import tiny
from tests.bench import calibrated


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return calibrated.write(tmp_path_factory.mktemp("calibrated"))


def test_a_results_file_of_a_checkpoint(checkpoint, tmp_path, capsys):
    out = tmp_path / "smollm2-calibration.json"
    calibration.main([str(checkpoint), "--prompts", "2", "--lengths", "2000", "--queries", "8", "--out", str(out)])
    content = json.loads(out.read_text())
    report.validate(content)
    rows = {row["name"]: row for row in content["rows"]}
    for kind in ("sign", "hata"):
        mass = rows[f"mass kept, {kind} R = 32, 10% of the tokens"]
        assert 0 < mass["value"] <= 1 and mass["control_name"] == "untrained" and len(mass["per_layer"]) == 3
        assert np.mean(mass["per_layer"]) == pytest.approx(mass["value"], abs=1e-5)
        assert 0 < rows[f"recall kept, {kind} R = 32, 2% of the tokens"]["value"] <= 1
    assert (
        rows["time of calibration, all parts, small"]["value"] == 15 and rows["time of calibration, hash"]["value"] == 2
    )
    chosen = rows["mass kept by the default retriever, sign R = 32"]
    assert chosen["control_name"] == "hata R = 32" and chosen["why"] == "held-out attention mass"
    assert "mass kept, sign" in capsys.readouterr().out


def test_exact_selection_keeps_everything():
    config = tiny.LLAMA
    codes = {("exact", 32): np.zeros((3, 2, 16, 32), np.float32)}
    found = calibration.quality(config, tiny.params(config), [tiny.prompt(150)], 8, codes)["exact", 32]
    np.testing.assert_allclose(found, np.ones((2, 3, len(SHARES))), atol=1e-6)


@pytest.mark.slow
def test_a_random_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "random_model", lambda head_dim: (tiny.LLAMA, tiny.params(tiny.LLAMA)))
    monkeypatch.setattr(
        calibration, "HashSettings",
        lambda *args, steps: real(*args, steps=steps, queries=4, keys=64),
    )  # fmt: skip
    out = tmp_path / "random.json"
    calibration.main(
        [
            "--random-model",
            "16",
            "--prompts",
            "1",
            "--lengths",
            "150",
            "--queries",
            "8",
            "--steps",
            "25",
            "--out",
            str(out),
        ]
    )
    names = [row["name"] for row in json.loads(out.read_text())["rows"]]
    assert all("(random weights, D = 16)" in name for name in names) and len(names) == 3 * 2 * 3 + 3 + 1


real = calibration.HashSettings


@pytest.mark.parametrize("arguments", [[], ["somewhere", "--random-model", "16"]])
def test_a_checkpoint_or_a_random_model(arguments, capsys):
    with pytest.raises(SystemExit):
        calibration.main(arguments)
    assert "one of them" in capsys.readouterr().err
