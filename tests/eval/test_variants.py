"""What --attention and --sparsity name."""

import pytest

from clo_jax.config import CloConfig
from clo_jax.eval.variants import FULL, NAMES, variants


def test_full_attention_always_comes_first_and_once():
    assert variants(["full"], [], CloConfig(), {}) == [FULL]
    found = variants(["clo", "full", "clo"], [0.1, 0.02, 0.1], CloConfig(retain=2.0), {"backend": "host"})
    assert [v.name for v in found] == ["full", "clo 10 %", "clo 2 %"]
    assert found[0].load == {"attention": "full"} and found[0].clo is None
    assert found[2].load == {"attention": "clo", "clo": CloConfig(sparsity=0.02, retain=2.0), "backend": "host"}


def test_exact_reads_keys_and_refreshes_every_head_at_each_step():
    (_, exact) = variants(["exact"], [0.05], CloConfig(retain=2.0), {"planner": "none", "calibration": "auto"})
    assert exact.attention == "exact" and exact.load["attention"] == "clo" and exact.load["planner"] == "none"
    assert exact.clo == CloConfig(sparsity=0.05, retriever="exact", sim_threshold=1.0, retain=2.0)


@pytest.mark.parametrize(
    "names, sparsities, message",
    [
        (["clo", "magic"], [0.1], f"--attention: got 'magic', wanted {', '.join(NAMES)}"),
        (["clo"], [], "--sparsity: got none, wanted at least one for clo"),
        (["clo"], [1.5], r"sparsity: got 1.5, wanted a number in \(0, 1\]"),
    ],
)
def test_wrong_calls_are_named(names, sparsities, message):
    with pytest.raises(ValueError, match=message):
        variants(names, sparsities, CloConfig(), {})
