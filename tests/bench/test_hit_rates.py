"""Hit rates by batch: which policies at which batches, and a file of a tiny checkpoint."""

import json

import pytest

from clo_jax.bench import hit_rates, report
from tests.bench import calibrated

CLO, PAPERS, RETROINFER = "clo 10 %", f"clo 10 %, {hit_rates.PAPERS}", "retroinfer 10 %"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return calibrated.write(tmp_path_factory.mktemp("hits") / "tiny")


def test_a_results_file(checkpoint, tmp_path, capsys):
    out = tmp_path / "cpu-tiny-hit-rates.json"
    sizes = ("--length", "256", "--batches", "2,1", "--rival-batches", "1", "--steps", "8", "--chunk", "4")
    hit_rates.main([str(checkpoint), str(out), *sizes])
    content = json.loads(out.read_text())
    report.validate(content)
    rows = {row["name"]: row for row in content["rows"]}
    measured = [(name, batch) for name in (CLO, PAPERS) for batch in (1, 2)] + [(RETROINFER, 1)]
    assert set(rows) == {f"hit rate, {name}, batch {batch}" for name, batch in measured}
    for name, batch in measured:
        row = rows[f"hit rate, {name}, batch {batch}"]
        assert 0 <= row["value"] <= 1 and row["batch"] == batch and row["context"] == 256
        assert row["hits_of"] == hit_rates.HITS_OF["retroinfer" if name == RETROINFER else "clo"]
        if name != RETROINFER:
            heads = 2 * (content["args"]["layers"] - 1)  # but those of layer 0
            assert row["lookups"] == batch * 8 * heads and row["retriever"] == "sign (trained)"
    row = rows[f"hit rate, {CLO}, batch 2"]
    assert row["control_name"] == "batch 1" and row["control"] == rows[f"hit rate, {CLO}, batch 1"]["value"]
    assert content["args"]["rival_batches"] == [1] and content["args"]["hits"] == "real"
    assert "| hit rate, retroinfer 10 %, batch 1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, message",
    [
        (("--rival-batches", "1,3"), "--rival-batches: got [1, 3], wanted some of --batches = [1, 2, 4, 8]"),
        (("--batches", "x"), "--batches: got 'x', wanted numbers"),
        (("--length", "64"), "--length: got 64, wanted at least"),
        (("--steps", "3"), "--steps: got 3, wanted a positive multiple of --chunk"),
    ],
)
def test_wrong_calls_are_named(checkpoint, args, message, capsys):
    with pytest.raises(SystemExit):
        hit_rates.main([str(checkpoint), "out.json", "--length", "256", *args])
    assert message in capsys.readouterr().err
