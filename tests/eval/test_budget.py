"""What is read of the context, against the formulas of the README."""

import pytest

from clo_jax.config import CloConfig
from clo_jax.eval import budget
from clo_jax.llm import LLM
from clo_jax.rivals import RIVALS, ExactConfig, InfiniGenConfig, PQCacheConfig, RetroInferConfig
from tests import tiny, tiny_checkpoint


def shares(prompt_tokens, new_tokens, resident=(), **clo):
    described = {"max_context": 4096, "dtype": "float32", "resident_heads": resident}
    load = {"attention": "clo", "clo": CloConfig(**clo)}
    return budget.shares(tiny.LLAMA, load, described, prompt_tokens, new_tokens)


def rival(config, prompt_tokens, new_tokens=2):
    described = {"max_context": 4096, "dtype": "float32"}
    load = {"attention": config.attention, "rival": config}
    return budget.shares(tiny.LLAMA, load, described, prompt_tokens, new_tokens)


def test_one_step():
    # n = 3000: flushed (3000 - 64) // 64 * 64 = 2880, tail 3001 - 2880 = 121 with the new token, sink 4, k = 300.
    found = shares(3000, 2)
    assert found.selected == pytest.approx(0.1)
    assert found.attended == pytest.approx((4 + 121 + 450) / 3001)


def test_resident_heads_read_everything():
    assert shares(3000, 2, [[0, [0, 1]]]).attended == pytest.approx(1 / 3 + 2 / 3 * 575 / 3001)


def test_means_over_the_steps_of_an_answer():
    every = [shares(1000 + i, 2) for i in range(99)]
    found = shares(1000, 100)
    assert found.selected == pytest.approx(sum(s.selected for s in every) / 99, rel=0.01)
    assert found.attended == pytest.approx(sum(s.attended for s in every) / 99, rel=0.02)
    assert shares(1000, 1) == shares(1000, 2)


def test_the_whole_budget_is_everything():
    assert shares(2000, 30, sparsity=1.0).attended == 1


def test_full_attention_reads_everything():
    assert budget.shares(tiny.LLAMA, {"attention": "full"}, {}, 100, 10) == (1, 1)


def test_rivals_at_one_step():
    """n = 3000 tokens before the step, 3001 with its own; a tenth of them."""
    assert rival(ExactConfig(), 3000) == pytest.approx((301 / 3000, 301 / 3001))
    # Two layers of three are on the device; the token itself comes on top.
    assert rival(InfiniGenConfig(), 3000) == pytest.approx((0.1, 2 / 3 + 1 / 3 * 301 / 3001))
    # ceil(0.1 * (3001 - 32)) = 297: 148 newest ones, 149 selected.
    assert rival(PQCacheConfig(), 3000) == pytest.approx((149 / 3000, (32 + 297) / 3001))
    # (3000 - 64 - 4) / 16 = 183 clusters of mean size, of which 18; steady 4 + 64 + the token itself.
    selected = 18 * 2932 / 183
    assert rival(RetroInferConfig(), 3000) == pytest.approx((selected / 3000, (69 + selected) / 3001))


def test_rivals_with_the_whole_budget_read_everything():
    for kind in (ExactConfig, PQCacheConfig, RetroInferConfig):
        assert rival(kind(sparsity=1.0), 2000, 30).attended == pytest.approx(1), kind
    assert rival(InfiniGenConfig(sparsity=1.0), 2000, 30).attended == pytest.approx(1)


def test_a_steady_zone_that_is_full_enters_the_index():
    small = RetroInferConfig(sparsity=0.5, recent_tokens=8, cluster_tokens=4, update_tokens=8)
    zones = [rival(small, 20, 2 + step) for step in (0, 40)]
    # 52 clustered tokens would be 13 clusters; without updates the steady zone would have 4 + 41.
    assert zones[0].attended > zones[1].attended > 0.5


@pytest.mark.parametrize("name", [name for name in RIVALS if name != "exact"])
def test_selected_is_what_the_rows_keeper_counts(tmp_path, name):
    more = {} if name != "retroinfer" else {"cluster_tokens": 4, "recent_tokens": 8, "buffer_clusters": 64}
    config = RIVALS[name](sparsity=0.25, **({"sink_tokens": 4} if name != "infinigen" else {}), **more)
    with LLM.load(tiny_checkpoint.write_checkpoint(tmp_path), attention=name, rival=config, max_context=160) as llm:
        answer = llm.generate(tiny.prompt(100), max_new_tokens=17, ignore_eos=True)[0]
        described = llm.describe()
    found = budget.shares(tiny.LLAMA, {"attention": name, "rival": config}, described, 100, 17)
    heads = tiny.LLAMA.num_kv_heads * (tiny.LLAMA.num_layers - config.full_layers)
    counted = answer.metrics.rows_selected / (16 * heads)  # rows of a head and step
    # Clusters are not all of mean size; the steps that stand for an answer are not all of them.
    assert found.selected * 107.5 == pytest.approx(counted, rel=0.3 if name == "retroinfer" else 0.02)
