"""What --attention and --sparsity name."""

import pytest

from clo_jax.config import CloConfig
from clo_jax.eval.variants import FULL, NAMES, variants
from clo_jax.rivals import RIVALS


def test_full_attention_always_comes_first_and_once():
    assert variants(["full"], [], CloConfig(), {}) == [FULL]
    found = variants(["clo", "full", "clo"], [0.1, 0.02, 0.1], CloConfig(retain=2.0), {"backend": "host"})
    assert [v.name for v in found] == ["full", "clo 10 %", "clo 2 %"]
    assert found[0].load == {"attention": "full"}
    assert found[2].load == {"attention": "clo", "clo": CloConfig(sparsity=0.02, retain=2.0), "backend": "host"}


@pytest.mark.parametrize("name", RIVALS)
def test_policies_that_clo_is_compared_with_get_the_sparsity_and_none_of_its_settings(name):
    (_, rival) = variants([name], [0.05], CloConfig(retain=2.0), {"planner": "paper", "calibration": "auto"})
    assert rival.load == {"attention": name, "rival": RIVALS[name](sparsity=0.05)}
    assert (rival.name, rival.attention, rival.sparsity) == (f"{name} 5 %", name, 0.05)


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
