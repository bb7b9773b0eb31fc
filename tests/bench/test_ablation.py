"""The ablation: its policy without Eq. 10, its questions, and a table of a tiny checkpoint."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.bench import ablation, report
from clo_jax.config import CloConfig
from clo_jax.text import Tokenizer
from tests import tiny
from tests.bench import calibrated

CLO = CloConfig(sim_threshold=0.6, guess_from="input", hash_bits=32)  # the guess of the bench, which random weights hit


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return calibrated.write(tmp_path_factory.mktemp("calibrated"))


def test_the_least_similar_head_of_a_group_counts():
    query = jnp.asarray([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 1.0]])
    label = jnp.asarray([[2.0, 0.0], [0.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
    np.testing.assert_allclose(ablation.least_cosine(query, label, 2), [-1, 0], atol=1e-6)
    np.testing.assert_allclose(ablation.least_cosine(query, label, 4), [1, -1, 0, 1], atol=1e-6)


def hit_rates(config, threshold_of=CLO):
    weights, found = tiny.params(config), []
    for kind in (ablation.CloPolicy, ablation.EveryHeadPolicy):
        with tiny.clo_policy(config, threshold_of, 1, 512) as (policy, engine):
            policy = kind(policy.layout, threshold_of, engine.handle, policy.scores)
            session = tiny.run(config, weights, policy, engine, [tiny.prompt(300)], 24)
            found.append((session.metrics().hit_rate, session.tokens))
    return found


@pytest.mark.slow
def test_groups_of_one_decide_as_their_head_does():
    (of_groups, tokens), (of_heads, same) = hit_rates(dataclasses.replace(tiny.LLAMA, num_kv_heads=6))
    assert 0 < of_groups == of_heads and tokens == same


@pytest.mark.slow
def test_a_group_hits_less_often_when_each_of_its_heads_must():
    (of_groups, _), (of_heads, _) = hit_rates(tiny.LLAMA)
    assert of_heads < of_groups


def test_questions_are_spread_over_the_lengths(checkpoint):
    asked = ablation.questions(Tokenizer.from_folder(checkpoint), 3, 1500, 3000, 1)
    lengths = [len(question.ids) for question in asked]
    assert lengths == sorted(lengths) and 1500 < lengths[0] < 1700 and 3000 < lengths[2] < 3200
    assert len({question.number for question in asked}) == 3


def test_a_results_file_of_a_checkpoint(checkpoint, tmp_path):
    out = tmp_path / "smollm2-ablation.json"
    kept, notes = [], []
    arguments, figures = ablation.run(
        str(checkpoint), 2, 1400, 1600, "auto", "auto", 3, lambda *parts: kept.append(parts), notes.append
    )  # fmt: skip
    report.write(out, "ablation", arguments, figures)
    content = json.loads(out.read_text())
    report.validate(content)
    rows = {row["name"]: row for row in content["rows"]}
    names = ("uniform", "+T", "+T +G", "uniform +G", "+T +G +P", "+T +G +P, nothing hidden")
    for name in names:
        assert 0 <= rows[f"hit rate, {name}"]["value"] <= 1
        assert 0 <= rows[f"rows moved / rows selected, {name}"]["value"] <= 1
        assert rows[f"answers right, {name}"]["questions"] == 2
    assert rows["hit rate, +T"]["value"] >= rows["hit rate, uniform"]["value"]
    assert rows["hit rate, +T +G"]["value"] >= rows["hit rate, +T"]["value"]
    planned = rows["hit rate, +T +G +P, nothing hidden"]
    assert planned["heads_that_prefetch_covers"] == 0 and planned["planned_for"] == "a link that hides nothing"
    assert planned["resident_heads"] >= 2
    assert [len(rows) for _, rows in kept] == sorted(len(rows) for _, rows in kept) and len(kept) == len(notes)
    assert notes[0].startswith("full: ") and "/" not in arguments["checkpoint"]


def test_sizes_that_make_no_sense_are_named(checkpoint):
    for prompts, shortest, longest, message in (
        (0, 1400, 1600, "--prompts: got 0"),
        (2, 1600, 1400, "--shortest, --longest: got 1600 and 1400"),
        (2, 1400, 5000, "up to the model's 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            ablation.run(str(checkpoint), prompts, shortest, longest, "auto", "auto", 3)
