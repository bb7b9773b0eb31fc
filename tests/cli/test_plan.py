"""clo-jax plan: tables, comparison of machines, the picture, wrong calls."""

import json

import numpy as np
import pytest

from clo_jax.cache import calibration
from clo_jax.cache.calibration_parts import Costs, Importance, Similarity
from tests import tiny, tiny_checkpoint


@pytest.fixture
def scores(tmp_path):
    """Head scores of the shape of Llama-3-8B: half of the heads matter."""
    table = np.zeros((32, 8))
    table[:, ::2] = 1
    path = tmp_path / "scores.tsv"
    np.savetxt(path, table, delimiter="\t")
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def calibrated(checkpoint):
    L, K = tiny.LLAMA.num_layers, tiny.LLAMA.num_kv_heads
    ones = np.ones((L, K), np.float32)
    adjacent = np.array([[0.5, 0.5], [0.95, 0.4], [0.85, 0.99]], np.float32)
    calibration.update(
        checkpoint / "calibration",
        Similarity(adjacent, adjacent, ones, ones, ones, ones, ones, ones),
        Costs(((1, 4096, 1e-3),), {"host": 1e8}, "a test", 1e10),
        Importance(ones, "gates"),
        provenance={},
    )
    return checkpoint


def plan_json(run, *args):
    result = run("plan", *args, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_published_scores_on_every_machine(run, scores):
    result = run("plan", "--scores", scores, "--preset", "paper", "--hardware", "pcie4", "--similarity", "0.8")
    assert result.code == 0
    assert "32 layers of 8 KV heads, batch 1, 131072 tokens; importance: duo-attention file" in result.out
    assert "similarity: 0.8 assumed for every head; machine: A40, PCIe 4" in result.out
    assert all(machine in result.out for machine in ("H200, PCIe 5", "B300, PCIe 6", "GH200, NVLink-C2C"))
    found = plan_json(run, "--scores", scores, "--preset", "paper", "--hardware", "pcie4", "--similarity", "0.8")
    # Four hard heads a layer, two of which prefetching covers.
    assert found["plan"]["prefetchable_heads"] == 2
    assert found["plan"]["resident_heads"][:2] == [[0, list(range(8))], [1, [0, 2]]]
    assert {(row["machine"], row["planner"]) for row in found["compared"]} == {
        (machine, planner) for machine in ("pcie4", "pcie5", "pcie6", "c2c") for planner in ("none", "paper", "cost")
    }
    assert all(row["fits"] for row in found["compared"])


def test_figures_of_a_machine_can_be_given(run, scores):
    figures = ["--link-gb-per-s", "10", "--memory-gb-per-s", "500", "--memory-gib", "24"]
    found = plan_json(run, "--scores", scores, "--hardware", "c2c", "--planner", "none", *figures)
    assert "GH200, NVLink-C2C changed (given)" in found["about"]
    given = {row["planner"]: row for row in found["compared"] if row["machine"] == "given"}
    c2c = {row["planner"]: row for row in found["compared"] if row["machine"] == "c2c"}
    assert given["none"]["step_s"] > 5 * c2c["none"]["step_s"]


def test_a_plan_that_does_not_fit_says_so(run, scores):
    arguments = ["--scores", scores, "--hardware", "pcie4", "--batch", "32", "--context", "32768"]
    result = run("plan", *arguments, "--planner", "cost")
    assert result.code == 2 and "kv_budget: got" in result.err
    result = run("plan", *arguments)
    assert result.code == 0 and "pcie4: kv_budget: got" in result.err
    rows = {(row["machine"], row["planner"]): row for row in plan_json(run, *arguments)["compared"]}
    assert rows["pcie4", "paper"]["fits"] is False and ("pcie4", "cost") not in rows


def test_a_calibrated_checkpoint(run, calibrated):
    result = run("plan", calibrated)
    assert result.code == 0
    assert "importance: gates; similarity: measured; machine: a test" in result.out
    assert "0.90 to 0.90" in result.out
    found = plan_json(run, calibrated, "--planner", "cost", "--kv-budget", "100000000")
    assert found["plan"]["resident_heads"][0] == [0, [0, 1]]
    assert {row["machine"] for row in found["compared"]} == {"measured", "pcie4", "pcie5", "pcie6", "c2c"}


def test_the_picture(run, scores, tmp_path):
    picture = tmp_path / "plan.png"
    result = run("plan", "--scores", scores, "--plot", picture)
    assert result.code == 0 and f"{picture}: written" in result.err
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "args, named",
    [
        ([], "CKPT, --scores: got neither"),
        (["CKPT", "--model", "llama3-8b"], "--model: got it together with a checkpoint"),
        (["--scores", "SCORES", "--model", "qwen2.5-14b"], r"scores: got shape (32, 8), wanted (48, 40) or (48, 8)"),
        (["--scores", "SCORES", "--similarity", "2"], "--similarity: got 2.0, wanted a cosine"),
        (["--scores", "SCORES", "--hardware", "measured"], "--hardware: got measured, but there are no measured costs"),
        (["--scores", "SCORES", "--context", "1"], "--batch, --context: got 1, 1, wanted"),
        (["--scores", "SCORES", "--batch", "0"], "--batch, --context: got 0, 131072, wanted"),
        (["--scores", "nowhere.tsv"], "nowhere.tsv: cannot be read"),
    ],
)
def test_wrong_calls_are_named(run, checkpoint, scores, args, named):
    places = {"CKPT": checkpoint, "SCORES": scores}
    result = run("plan", *(places.get(arg, arg) for arg in args))
    assert result.code in (1, 2) and named in result.err
