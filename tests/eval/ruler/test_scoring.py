"""RULER's scores on planted answers, through the same summary that the command prints."""

import pathlib

import pytest

from clo_jax.config import CloConfig
from clo_jax.eval.answers import Answer, Key
from clo_jax.eval.ruler import TASKS
from clo_jax.eval.runner import Outcome, Plan
from clo_jax.eval.samples import PromptFormat, make_sample
from clo_jax.eval.sources import Sources
from clo_jax.eval.summary import summarize
from clo_jax.eval.variants import variants
from tests.eval.fakes import Words

OWN = {name: task for name, task in TASKS.items() if task.needs is None}
LENGTH, NUMBER = 1200, 4


def outcome(plant):
    """plant(variant's name, sample) -> the answer's text."""
    chosen = tuple(variants(["clo"], [0.1], CloConfig(), {}))
    plan = Plan(
        "ruler", "ckpt", tuple(OWN.values()), chosen, (LENGTH,), NUMBER, 0, None, "auto", 1, Sources(), pathlib.Path()
    )
    prompts = PromptFormat(Words(), True)
    made = {
        (LENGTH, name): [make_sample(task, i, LENGTH, prompts, Sources(), 0) for i in range(NUMBER)]
        for name, task in OWN.items()
    }
    answers = {}
    for variant in chosen:
        for (length, name), samples in made.items():
            for sample in samples:
                key = Key(variant.name, "s", length, name, sample.index)
                moving = {} if variant.name == "full" else {"hit_rate": 0.5, "rows_moved": 40.0, "selected": 0.1}
                answers[key] = Answer(key, plant(variant.name, sample), 11, "stop", **moving)
    return Outcome(plan, True, made, {}, answers, {}, {v.name: "s" for v in chosen}, {}, {}, pathlib.Path())


def test_right_answers_and_the_first_of_them():
    full, clo = summarize(outcome(lambda name, s: "\n".join(s.outputs) if name == "full" else f"It is {s.outputs[0]}"))
    parts = {"niah_multivalue": 25, "niah_multiquery": 25, "vt": 20, "cwe": 10, "fwe": 100 / 3}
    assert all(score.value == 100 and score.samples == NUMBER for score in full.tasks.values())
    assert {name: score.value for name, score in clo.tasks.items()} == pytest.approx(
        {name: parts.get(name, 100) for name in OWN}
    )
    mean = (6 * 100 + sum(parts.values())) / 11
    assert full.mean.value == 100 and clo.mean.value == pytest.approx(mean)
    assert full.loss is None and clo.loss.value == pytest.approx(100 - mean)
    assert clo.loss.low == pytest.approx(clo.loss.value) == pytest.approx(clo.loss.high)  # the same loss everywhere
    assert full.hit_rate is None and full.rows_moved is None
    assert (clo.hit_rate, clo.rows_moved, clo.selected, clo.attended) == (0.5, 4.0, pytest.approx(0.1), None)


def test_half_of_the_answers_wrong_and_some_empty():
    def plant(name, sample):
        if name == "full" or sample.index % 2:
            return " ".join(sample.outputs).upper()
        return "\x01 \n" if sample.index else "no idea"

    full, clo = summarize(outcome(plant))
    assert clo.mean.value == 50 and clo.loss.value == 50
    assert clo.loss.low < 50 < clo.loss.high and clo.mean.low < 50 < clo.mean.high
    assert clo.mean.empty == len(OWN) and clo.tasks["vt"].empty == 1 and full.mean.empty == 0
    assert clo.tasks["vt"].low == pytest.approx(15.0, abs=0.1)  # Wilson of 2 in 4


def test_better_than_full_attention_is_a_negative_loss():
    _, clo = summarize(outcome(lambda name, s: "" if name == "full" and s.index == 0 else " ".join(s.outputs)))
    assert clo.loss.value == -25
