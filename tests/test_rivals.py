"""The policies that CLO is compared with, as a user loads them."""

import pytest

from clo_jax.llm import LLM
from clo_jax.rivals import RIVALS, ExactConfig
from tests import tiny, tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", RIVALS)
def test_answers_and_metrics(checkpoint, name):
    with LLM.load(checkpoint, attention=name, rival=RIVALS[name](sparsity=0.25), max_context=128) as llm:
        answers = llm.generate([tiny.prompt(80), tiny.prompt(9, seed=1)], max_new_tokens=6, ignore_eos=True)
        described = llm.describe()
    assert [len(answer.token_ids) for answer in answers] == [6, 6]
    metrics = answers[0].metrics
    assert metrics.attention == name and metrics.sparsity == 0.25 and metrics.retriever
    assert metrics.device_kv_bytes == sum(metrics.device_kv_parts.values()) > 0
    assert (metrics.host_kv_bytes > 0) == (metrics.backend is not None) == (metrics.rows_moved > 0)
    assert metrics.bytes_moved == metrics.rows_moved * 2 * tiny.HEAD_DIM * 4
    assert described["attention"] == name and described["settings"]["sparsity"] == 0.25


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"attention": "clo", "rival": ExactConfig()}, "rival: got ExactConfig with attention clo, wanted None"),
        ({"attention": "exact", "rival": 0.1}, "rival: got float with attention exact, wanted ExactConfig"),
        ({"attention": "exact", "planner": "paper"}, "planner: got 'paper' with attention exact"),
        ({"attention": "exact", "backend": "pull"}, "got True, 'pull', None with attention exact"),
    ],
)
def test_refused(checkpoint, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM.load(checkpoint, **settings)
