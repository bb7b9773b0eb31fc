"""The grid's tasks: one for each depth."""

import pytest

from clo_jax.eval import niah
from clo_jax.eval.samples import PromptFormat, make_sample
from clo_jax.eval.sources import Sources
from tests.eval.fakes import Words


def test_one_task_for_each_depth_with_its_needle_there():
    tasks = niah.tasks([0, 0.25, 1, 0.25])
    assert [task.name for task in tasks] == ["depth 0", "depth 0.25", "depth 1"]
    for task, depth in zip(tasks, (0, 0.25, 1), strict=True):
        sample = make_sample(task, 0, 1500, PromptFormat(Words(), True), Sources(), 0)
        assert sample.depths == (depth,) and len(sample.outputs) == 1
        assert abs(sample.text.index(sample.outputs[0]) / len(sample.text) - depth) < 0.06


def test_a_depth_outside_the_text_is_refused():
    with pytest.raises(ValueError, match=r"depths: got 1.5, wanted numbers in \[0, 1\]"):
        niah.tasks([0.5, 1.5])
