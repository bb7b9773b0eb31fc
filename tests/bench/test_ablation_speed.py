"""The ablation in time, at a tiny shape: which parts are timed over which cache, and the rows that come of it."""

import json

import pytest

from clo_jax.bench import ablation_speed, decode, report, shapes
from clo_jax.bench.ablation_speed import DELTA, PARTS, SETS, SOURCE, UNIFORM, WHOLE, Part
from clo_jax.bench.subject import find
from clo_jax.cache.layout import CacheLayout
from clo_jax.errors import MemoryPlanError
from clo_jax.eval.variants import FULL

TINY = ("--shape", "tiny", "--dtype", "float32", "--context", "1024", "--steps", "16", "--chunk", "4")
LLAMA = shapes.shape("llama3-8b")


def planned(shape="llama3-8b", context=131072, parts=None, **sizes):
    plan = decode.Plan(find(None, shape, None, "auto"), (FULL,), (context,), **sizes)
    return ablation_speed.ablation(plan, parts or ablation_speed.read(SOURCE, shapes.shape("smollm2-135m")))


def test_parts_are_those_of_the_file():
    rows = {row["name"]: row for row in json.loads(SOURCE.read_text())["rows"]}
    parts = ablation_speed.read(SOURCE, shapes.shape("smollm2-135m"))
    assert tuple(part.name for part in parts) == PARTS
    for part in parts:
        assert part.hit_rate == rows[f"hit rate, {part.name}"]["value"]
        assert part.new_rows == rows[f"rows moved / rows selected, {part.name}"]["value"]
    assert [part.resident for part in parts] == [0, 0, 0, 0, (27 - 3) / (90 - 3)]


def test_a_file_without_a_part_or_of_another_model_is_named(tmp_path):
    path, content = tmp_path / "ablation.json", json.loads(SOURCE.read_text())
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"ablation.json: got 3 resident heads, wanted those of ModelConfig"):
        ablation_speed.read(path, LLAMA)
    content["rows"] = [row for row in content["rows"] if row["name"] != "rows moved / rows selected, +T"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"ablation.json: got no row 'rows moved / rows selected, \+T'"):
        ablation_speed.read(path, LLAMA)


@pytest.mark.parametrize("share", [0, 0.1, 24 / 87, 0.5, 1])
def test_resident_heads_are_spread_over_the_layers(share):
    resident = dict(ablation_speed.resident_heads(LLAMA, share))
    counts = [len(resident[layer]) for layer in range(1, LLAMA.num_layers)]
    assert len(resident[0]) == LLAMA.num_kv_heads and max(counts) - min(counts) <= 1
    assert sum(counts) == int(share * LLAMA.num_kv_heads * (LLAMA.num_layers - 1) + 1e-9)


def test_parts_share_a_cache_and_equals_are_timed_once():
    asked = planned()
    assert [(run.sets, [part.name for part in run.ways]) for run in asked.runs] == [
        (WHOLE, [UNIFORM, "+T", "+T +G"]), (DELTA, [UNIFORM, "+T", "+T +G"]),
        (WHOLE, ["+T +G +P, nothing hidden"]), (DELTA, ["+T +G +P, nothing hidden"]),
    ]  # fmt: skip
    assert asked.timed["+T +G +P"].name == "+T +G"
    for run in asked.runs:
        layouts = {CacheLayout.clo(LLAMA, way.load["clo"], 1, 131072, "bfloat16") for way in run.ways.values()}
        assert len(layouts) == 1
        assert {way.load["clo"].refresh for way in run.ways.values()} == {"whole" if run.sets == WHOLE else "delta"}


def test_a_results_file(tmp_path, capsys):
    out = tmp_path / "h200-ablation.json"
    ablation_speed.main([str(out), *TINY])
    content = json.loads(out.read_text())
    report.validate(content)
    rows = {row["name"]: row for row in content["rows"]}
    base = rows["uniform, whole sets, 1024 tokens"]
    for part in PARTS:
        for sets in SETS:
            step = rows[f"step, {part}, {sets}"]
            timed = rows[f"{step['timed_as']}, {sets}, 1024 tokens"]
            assert step["value"] == timed["step_ms"] and step["control"] == base["step_ms"]
            assert step["latency_cut"] == pytest.approx(1 - step["ratio"])
            assert timed["hits"] == "replayed" and timed["hit_rate"] == pytest.approx(step["hit_rate_found"], abs=0.1)
            if sets == WHOLE:
                assert timed["new_rows"] == 1
    moved = [rows[f"{part}, whole sets, 1024 tokens"]["rows_moved_per_step"] for part in (UNIFORM, "+T")]
    assert moved[0] > 2 * moved[1]
    assert rows["uniform, delta, 1024 tokens"]["rows_moved_per_step"] < moved[0]
    more, few = (rows[f"step, {part}, delta"]["resident_heads"] for part in (PARTS[-1], UNIFORM))
    assert more > few == 2 and rows["step, +T, delta"]["kv_heads"] == 6
    for control in (decode.WEIGHTS_ONLY, "full"):
        assert rows[f"step, {control}"]["control_name"] == "step, uniform, whole sets"
    assert content["args"]["parts_of"] == "smollm2-ablation.json"
    assert "| step, +T +G +P, whole sets |" in capsys.readouterr().out


def test_what_does_not_fit_is_listed_but_the_base_must(monkeypatch):
    part = Part(UNIFORM, 0.5, 0.5, 0.0)
    asked = planned("tiny", 1024, (part, part._replace(name="+T", resident=0.5)), steps=4, chunk=4)

    def refused(sets):
        def measure(asked, run, params, found, progress):
            if run.sets == sets:
                raise MemoryPlanError("no room")
            for way in run.ways.values():
                found[way.name, 1024, 1] = None

        return measure

    monkeypatch.setattr(ablation_speed, "_measure_run", refused(DELTA))
    found, skipped = ablation_speed.measure(asked)
    assert skipped == dict.fromkeys(("uniform, delta, 1024 tokens", "+T, delta, 1024 tokens"), "no room")
    assert {name for name, *_ in found} == {decode.WEIGHTS_ONLY, "full", "uniform, whole sets", "+T, whole sets"}
    monkeypatch.setattr(ablation_speed, "_measure_run", refused(WHOLE))
    with pytest.raises(MemoryPlanError, match="no room"):
        ablation_speed.measure(asked)


@pytest.mark.parametrize(
    "args, message",
    [(("--context", "512"), "--context: got 512, wanted at least"), (("--shape", "gpt"), "--shape: got 'gpt'"),
     (("--batch", "0"), "--batch: got 0"), (("--layers", "9"), "--layers: got 9")],
)  # fmt: skip
def test_wrong_calls_are_named(args, message, capsys):
    with pytest.raises(SystemExit):
        ablation_speed.main(["out.json", "--shape", "tiny", "--context", "4096", *args])
    assert message in capsys.readouterr().err


def test_steps_of_a_run_are_those_of_its_parts():
    asked = planned(steps=64, chunk=16)
    first, last = asked.length(asked.runs[0]), asked.length(asked.runs[-1])
    assert first.steps == 3 * (64 + 16) + 2 * 2 * decode.TUNING_ROUNDS * 16 and last.steps == 64 + 16
