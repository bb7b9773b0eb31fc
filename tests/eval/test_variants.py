"""What --attention and --sparsity name."""

import pytest

from clo_jax.config import CloConfig
from clo_jax.eval.variants import FULL, NAMES, variants, varied
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


def test_clo_is_compared_with_itself():
    ways = variants(["clo", "exact"], [0.1, 0.02], CloConfig(recent_tokens=32), {"backend": "host"})
    found = varied(ways, ["retain=1,refresh=whole", "refresh_on_flush=false"])
    assert found[: len(ways)] == ways and len(found) == len(ways) + 4
    assert [v.name for v in found[-4:-2]] == ["clo 10 %, retain=1,refresh=whole", "clo 2 %, retain=1,refresh=whole"]
    changed = CloConfig(sparsity=0.02, recent_tokens=32, retain=1.0, refresh="whole")
    assert found[-3].load == {"attention": "clo", "clo": changed, "backend": "host"}
    assert found[-1].load["clo"].refresh_on_flush is False


@pytest.mark.parametrize(
    "change, message",
    [
        ("magic=1", r"--vary: got 'magic=1', wanted SETTING=VALUE,\.\.\. of retriever, hash_bits, "),
        ("retain", "--vary: got '' for retain, wanted a value such as 1.5"),
        ("refresh_on_flush=maybe", "--vary: got 'maybe' for refresh_on_flush, wanted a value such as True"),
        ("retain=0.5", "retain: got 0.5, wanted a number >= 1"),
        ("sparsity=0.2", "--vary: got 'sparsity=0.2', wanted SETTING=VALUE"),
    ],
)
def test_wrong_changes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        varied(variants(["clo"], [0.1], CloConfig(), {}), [change])


def test_a_change_wants_clo():
    with pytest.raises(ValueError, match="--vary: got 'retain=1' without clo in --attention"):
        varied(variants(["exact"], [0.1], CloConfig(), {}), ["retain=1"])
