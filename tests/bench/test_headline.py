"""The runs with goals, at a tiny shape: what they measure, which ratios they give, and that a CPU is not judged."""

import dataclasses
import json

import pytest

from clo_jax.bench import decode, headline, report
from clo_jax.bench.subject import find
from clo_jax.transfer.counters import Counters

TINY = ("--shape", "tiny", "--layers", "2", "--dtype", "float32", "--steps", "8", "--chunk", "4")


def run(name, tmp_path, *more):
    out = tmp_path / "out.json"
    headline.main([name, str(out), *TINY, *more])
    content = json.loads(out.read_text())
    report.validate(content)
    return content, {row["name"]: row for row in content["rows"]}


def test_at_128k(tmp_path, capsys):
    content, rows = run("128k", tmp_path, "--contexts", "512", "--batches", "1")
    assert content["args"]["run"] == "128k" and content["args"]["hit_rate"] == 0.79
    step, clo = rows["step, clo 10 %, 512 tokens, batch 1"], rows["clo 10 %, 512 tokens"]
    assert step["value"] == clo["step_ms"] and step["control_name"] == "step, weights only, batch 1"
    assert rows["step, full, 512 tokens, batch 1"]["control"] == step["value"]
    for name in ("clo 10 %, kv_dtype=int8", "clo 10 %, guess_from=input", "clo 10 % on the device"):
        assert rows[f"step, {name}, 512 tokens, batch 1"]["control"] == step["value"]
    kept = rows["device KV, clo 10 %, 512 tokens, batch 1"]
    assert kept["value"] == clo["device_kv_bytes"] and kept["control"] == rows["full, 512 tokens"]["device_kv_bytes"]
    assert rows["processor cores busy, clo 10 %, 512 tokens, batch 1"]["value"] == clo["cpu_cores_busy"]
    assert 0 <= rows["overlap, clo 10 %, 512 tokens, batch 1"]["value"] <= 1
    best = next(row for name, row in rows.items() if name.startswith("within 48 GiB: "))
    winner = best["name"].removeprefix("within 48 GiB: ").removesuffix(", batch 1")
    ways = [rows[f"{name}, 512 tokens"] for name in ("clo 10 %, kv_dtype=int8", "clo 10 %, guess_from=input")]
    assert best["value"] == rows[winner]["value"] == max(row["value"] for row in (clo, *ways))
    assert best["control"] == rows["full, 512 tokens"]["value"]
    assert not any("goal" in row or "RetroInfer" in row["name"] for row in content["rows"])
    assert "| step, clo 10 %, 512 tokens, batch 1 |" in capsys.readouterr().out


def test_int8_rows_and_early_guesses(tmp_path):
    _, rows = run("early", tmp_path, "--contexts", "512", "--batches", "1")
    name = "clo 10 %, kv_dtype=int8,guess_from=input"
    clo = rows[f"{name}, 512 tokens"]
    assert rows["step, full, 512 tokens, batch 1"]["control"] == clo["step_ms"]
    assert rows[f"device KV, {name}, 512 tokens, batch 1"]["value"] == clo["device_kv_bytes"]
    assert 0 <= rows[f"overlap, {name}, 512 tokens, batch 1"]["value"] <= 1
    assert rows[f"within 48 GiB: {name}, 512 tokens, batch 1"]["value"] == clo["value"]


@pytest.mark.slow
def test_every_head_refreshed(tmp_path):
    _, rows = run("always", tmp_path, "--contexts", "1024")
    clo = rows["clo 10 %, 1024 tokens"]
    assert clo["hit_rate"] == 0 and clo["new_rows"] == pytest.approx(0.14, abs=0.05)
    assert rows["step, clo 10 %, 1024 tokens, batch 1, refreshed at every step"]["value"] == clo["step_ms"]


@pytest.mark.slow
def test_growth(tmp_path):
    _, rows = run("growth", tmp_path, "--contexts", "512,1024")
    for name in ("clo 10 %", "clo 10 %, kv_dtype=fp8", "full"):
        row = rows[f"step, {name}, 1024 tokens, batch 1"]
        assert row["control"] == rows[f"{name}, 512 tokens"]["step_ms"] and row["value"] > 0


def test_what_does_not_fit_has_no_row():
    steps = headline.Steps(plan=None, found={}, link=1.0)
    assert steps.ratio(("full", 512, 1), ("clo 10 %", 512, 1), None) == []


@pytest.mark.parametrize(
    "args, message",
    [(("--contexts", "64"), "--lengths: got 64, wanted at least"), (("--shape", "gpt"), "--shape: got 'gpt'"),
     (("--batches", "x"), "invalid literal"), (("--layers", "9"), "--layers: got 9")],
)  # fmt: skip
def test_wrong_calls_are_named(args, message, capsys):
    with pytest.raises(SystemExit):
        headline.main(["128k", "out.json", "--shape", "tiny", *args])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", headline.HEADLINES)
def test_every_run_can_be_asked(name):
    """Its model allows its lengths, and its goals are about variants that it measures."""
    chosen = headline.HEADLINES[name]
    planned = headline.plan(chosen, find(None, chosen.shape, chosen.layers, "auto"))
    moved = Counters(*[1] * len(dataclasses.fields(Counters)))
    one = decode.Measured([1.0] * 8, 0.1, 0, moved, None, "replayed", {}, {"rows": 1}, 1)
    found = {(way.name, c, b): one for b in planned.batches for way in planned.ways_at(b) for c in planned.contexts}
    assert all(found.keys() >= {(name, planned.contexts[0], b) for name in only} for b, only in chosen.only.items())
    found |= {(decode.WEIGHTS_ONLY, 0, batch): one for batch in planned.batches}
    rows = chosen.goals(headline.Steps(planned, found, 1.0))
    assert any(row.goal is not None for row in rows)
    assert len({row.name for row in rows}) == len(rows)
