"""`LLM` where its cache is split between a GPU and the host."""

import re

import jax.numpy as jnp
import pytest

from clo_jax import memory
from clo_jax.config import CloConfig
from clo_jax.errors import MemoryPlanError
from clo_jax.llm import LLM
from tests import tiny, tiny_checkpoint

pytestmark = pytest.mark.gpu
CLO = CloConfig(sparsity=0.2, hash_bits=64, recent_tokens=16, flush_tokens=8)
SETTINGS = {"clo": CLO, "max_context": 256, "chunk_tokens": 4}
OPTIONS = {"max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_auto_takes_pull_and_pinning_is_told(checkpoint):
    told = []
    with LLM.load(checkpoint, pinning=lambda done, total: told.append((done, total)), **SETTINGS) as llm:
        answer = llm.generate(tiny.prompt(150), **OPTIONS)[0]
        assert told and told[-1][0] == told[-1][1] >= answer.metrics.host_kv_bytes
    assert answer.metrics.backend == "pull" and answer.metrics.rows_moved > 0


def test_a_full_device_is_refused_and_the_next_call_works(checkpoint):
    with LLM.load(checkpoint, **SETTINGS) as llm:
        want = llm.generate(tiny.prompt(150), **OPTIONS)[0].token_ids
        found = memory.device()
        full = jnp.zeros(found.pool_limit - found.pool_used - (256 << 20), jnp.uint8)
        with pytest.raises(MemoryPlanError, match="In XLA's pool on the device") as error:
            llm.generate(tiny.prompt(150), **OPTIONS)
        figures = re.search(
            r"need ([\d.]+) GiB \(.*?\) and a reserve of ([\d.]+) GiB, together ([\d.]+) GiB; available ([\d.]+) GiB",
            str(error.value),
        )
        need, reserve, together, available = map(float, figures.groups())
        assert abs(need + reserve - together) <= 0.011 and available < together
        del full
        assert llm.generate(tiny.prompt(150), **OPTIONS)[0].token_ids == want
