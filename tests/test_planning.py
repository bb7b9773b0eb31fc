"""Plans that take effect: from a calibration to the resident heads of a run and its metrics."""

import dataclasses

import numpy as np
import pytest

from clo_jax.cache import calibration
from clo_jax.cache.calibration_parts import Costs, Importance, Similarity
from clo_jax.cache.planner import with_resident
from clo_jax.config import CloConfig
from clo_jax.llm import LLM
from clo_jax.planning import PlanOptions, backend_of, measured_heads
from tests import tiny, tiny_checkpoint

L, K = tiny.LLAMA.num_layers, tiny.LLAMA.num_kv_heads
CLO = CloConfig(
    sparsity=0.2, hash_bits=64, recent_tokens=16, flush_tokens=8, sim_threshold=0.8, guess_from="input"
)  # fmt: skip
# Head 1 of layer 1 changes much from step to step, head 0 of layer 2 a little too much.
ADJACENT = np.array([[0.5, 0.5], [0.95, 0.4], [0.85, 0.99]], np.float32)
# A link that carries half a head while a layer computes: nothing is covered by prefetching.
HEAD_BYTES = 52 * 2 * tiny.LLAMA.head_dim * 4
COSTS = Costs(((1, 256, 1e-3), (2, 256, 1e-3)), {"host": HEAD_BYTES / 2e-3}, "a test", 1e10)


def similarity(adjacent=ADJACENT, head_scores="neutral", **clo):
    ones, settings = np.ones((L, K), np.float32), {"clo": clo, "head_scores": head_scores}
    return Similarity(adjacent, adjacent, ones, 0.25 * ones, ones, 0.5 * ones, ones, ones, settings)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def measured(tmp_path):
    calibration.update(
        tmp_path, similarity(), COSTS, Importance(np.ones((L, K), np.float32), "gates"), provenance={}
    )  # fmt: skip
    return tmp_path


def load(checkpoint, folder, **options):
    return LLM.load(checkpoint, **{"clo": CLO, "max_context": 256, "chunk_tokens": 4, "calibration": folder, **options})


def answer(llm, prompts=1):
    return llm.generate([tiny.prompt(100)] * prompts, max_new_tokens=6, ignore_eos=True)[0]


def test_the_paper_s_plan_decides_which_heads_stay(checkpoint, measured):
    with load(checkpoint, measured, planner="paper") as llm:
        policy, _ = llm._preparation.prepare(1, 10)
        assert policy.layout.resident == ((0, 1), (1,), (0,))
        about, metrics = llm.describe(), answer(llm).metrics
    assert (metrics.planner, metrics.resident_heads) == ("paper", 4)
    assert about["planner"] == "paper" and about["costs_measured_on"] == "a test"
    assert about["resident_heads"] == [[0, [0, 1]], [1, [1]], [2, [0]]]
    # The margin is what makes a cosine of 0.85 a hard one at a threshold of 0.8.
    with load(checkpoint, measured, planner="paper", clo=dataclasses.replace(CLO, reuse_margin=0.01)) as llm:
        assert llm._preparation.prepare(1, 10)[0].layout.resident == ((0, 1), (1,), ())


def test_without_a_planner_nothing_changes(checkpoint, measured):
    with load(checkpoint, measured) as llm:
        assert llm._preparation.prepare(1, 10)[0].layout.resident == ((0, 1), (), ())
        metrics = answer(llm).metrics
    assert (metrics.planner, metrics.resident_heads) == ("none", 2)


def test_cost_fills_its_budget_with_the_heads_that_move_most(checkpoint, measured):
    with load(checkpoint, measured) as llm:
        layout = llm._preparation.layout(1)
    least = sum(layout.device_bytes().values())
    one_more = with_resident(tiny.LLAMA, CLO, layout, ((0, (0, 1)), (1, (1,))))
    budget = least + 3 * (sum(one_more.device_bytes().values()) - least) // 2  # room for one head and a half
    with load(checkpoint, measured, planner="cost", kv_budget=least) as llm:
        assert llm._preparation.prepare(1, 10)[0].layout.resident == ((0, 1), (), ())
    with load(checkpoint, measured, planner="cost", kv_budget=budget) as llm:
        layout = llm._preparation.prepare(1, 10)[0].layout
        assert layout.resident == ((0, 1), (1,), ())
        assert sum(layout.device_bytes().values()) <= budget
        assert answer(llm).metrics.planner == "cost"
    with pytest.raises(ValueError, match=f"kv_budget: got {least - 1}, wanted at least {least} bytes"):
        load(checkpoint, measured, planner="cost", kv_budget=least - 1)


def test_each_batch_size_has_its_own_plan(checkpoint, measured):
    costs = dataclasses.replace(
        COSTS, link_bytes_per_s={"host": HEAD_BYTES / 0.7e-3}
    )  # covers one head of one sequence
    calibration.update(measured, costs, similarity(np.full((L, K), 0.5, np.float32)), provenance={})
    with load(checkpoint, measured, planner="paper") as llm:
        assert llm._preparation.layout(1).resident == ((0, 1), (0,), (0,))
        assert llm._preparation.layout(2).resident == ((0, 1), (0, 1), (0, 1))


def test_answers_with_a_plan_are_those_of_the_same_heads_given(checkpoint, measured):
    with load(checkpoint, measured, planner="paper") as llm:
        planned = answer(llm)
    given = dataclasses.replace(CLO, resident_heads=((0, (0, 1)), (1, (1,)), (2, (0,))))
    with load(checkpoint, measured, clo=given) as llm:
        assert answer(llm).token_ids == planned.token_ids


@pytest.mark.parametrize(
    "options, named",
    [
        ({"planner": "best"}, "planner: got 'best', wanted none, paper or cost"),
        ({"planner": "paper", "kv_budget": 1}, "kv_budget: got 1 with planner paper"),
        ({"planner": "paper", "calibration": None}, "planner: got 'paper' without measured similarity"),
        ({"planner": "paper", "attention": "full"}, "planner: got 'paper' with attention full"),
        (
            {"planner": "paper", "clo": dataclasses.replace(CLO, resident_heads=((0, (0, 1)),))},
            "planner: got 'paper' together with resident_heads",
        ),
        ({"adapt": True}, "adapt: got True with planner none"),
        ({"planner": "paper", "backend": "pull"}, "backend: got 'pull', whose bandwidth was not measured"),
    ],
)
def test_what_a_plan_lacks_is_named(checkpoint, measured, options, named):
    with pytest.raises(ValueError, match=named):
        load(checkpoint, measured, **options)


def test_costs_are_needed(checkpoint, tmp_path):
    calibration.update(tmp_path, similarity(), provenance={})
    with pytest.raises(ValueError, match="without measured costs.*clo-jax calibrate CKPT --costs"):
        load(checkpoint, tmp_path, planner="paper")


def test_measured_figures_count_under_their_own_settings():
    settings = dict(
        sim_threshold=0.8, importance_power=3.0, refresh_on_flush=True, refresh="delta", retain=1.5, sparsity=0.2,
        guess_from="input",
    )  # fmt: skip
    ones = np.ones((L, K))
    found = measured_heads(ones, "neutral", similarity(**settings), CLO)
    assert found.hit_rate[0, 0] == 0.25 and found.new_rows[0, 0] == 0.5
    assert measured_heads(ones, "given", similarity(**settings), CLO).hit_rate is None
    other = measured_heads(ones, "neutral", similarity(**settings | {"sim_threshold": 0.7, "retain": 2.0}), CLO)
    assert other.hit_rate is None and other.new_rows is None
    np.testing.assert_array_equal(other.similarity, ADJACENT)
    other = measured_heads(ones, "neutral", similarity(**settings | {"guess_from": "attention"}), CLO)
    assert other.hit_rate is None and other.new_rows[0, 0] == 0.5


def test_backend_of_a_plan():
    assert backend_of("pull", COSTS) == "pull"
    assert backend_of("auto", COSTS) == "host"
    with pytest.raises(ValueError, match="planner"):
        PlanOptions("fast")


def test_a_plan_follows_the_workload(checkpoint, measured):
    """The calibration says that every head is easy; the random model's heads are not."""
    calibration.update(measured, similarity(np.full((L, K), 0.999, np.float32)), provenance={})
    wide = dataclasses.replace(CLO, reuse_margin=0.15)
    with load(checkpoint, measured, planner="paper", adapt=True, clo=wide) as llm:
        assert llm._preparation.layout(1).resident == ((0, 1), (), ())
        first = llm.generate(tiny.prompt(100), max_new_tokens=100, ignore_eos=True)[0]
        seen = llm._preparation.plans._seen.similarity
        assert (seen[1:] < 0.95).all()
        layout = llm._preparation.layout(1)
        assert layout.resident[1:] != ((), ())
        again = answer(llm)
    assert first.metrics.plan_revision["number"] == 0 and first.metrics.resident_heads == 2
    revision = again.metrics.plan_revision
    assert revision["number"] == 1 and revision["left"] == ()
    assert set(revision["became_resident"]) == {(layer, head) for layer in (1, 2) for head in layout.resident[layer]}
    assert again.metrics.resident_heads == 2 + len(revision["became_resident"])
    assert revision["similarity_change"] > 0.01


def test_tracking_changes_no_token(checkpoint, measured):
    prompt = tiny.prompt(120)
    with load(checkpoint, measured, planner="paper") as llm:
        plain = llm.generate(prompt, max_new_tokens=30, ignore_eos=True)[0]
    with load(checkpoint, measured, planner="paper", adapt=True) as llm:
        tracked = llm.generate(prompt, max_new_tokens=30, ignore_eos=True)[0]
        found = llm._preparation.plans._seen
    assert tracked.token_ids == plain.token_ids
    assert tracked.metrics.hit_rate == plain.metrics.hit_rate
    assert np.all(np.abs(found.similarity) <= 1)
