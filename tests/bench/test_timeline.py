"""What the time of a traced chunk went into: made-up events, a made-up trace file, the whole command but its trace."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from clo_jax.bench import decode, replay, report, timeline
from clo_jax.bench.subject import Subject
from clo_jax.bench.timeline import Event
from clo_jax.config import CloConfig
from clo_jax.errors import CloError
from clo_jax.eval.variants import variants
from tests import tiny

READ = "void clo::cuda::(anonymous namespace)::read_rows<clo::cuda::Tile<__nv_bfloat16, 128> >(clo::cuda::AttendArgs)"
SERVE = "clo::cuda::serve_resident_kernel(clo::cuda::Ring, long)"
LAYERS, CHUNK = 2, 4


def own(found):
    return {kernel.name: kernel.own_ns for kernel in found.kernels}


@pytest.mark.parametrize(
    "name, group, shown",
    [
        (READ, "attend", "read_rows"),
        ("_ZN3clo4cuda12_GLOBAL__N_115merge_fragmentsINS0_4TileEEEvNS0_10AttendArgsE", "attend", "merge_fragments"),
        ("void clo::cuda::select_kernel<(Retriever)1, 2, true>(SelectArguments)", "prefetch", "select_kernel"),
        ("offload_quantized_kernel", "offload", "offload_quantized_kernel"),
        ("void clo::cuda::add_norms_kernel<float, float, 2, 4, 1>(AddNormsParams, float)", "norms", "add_norms_kernel"),
        (SERVE, "transfer", "serve_resident_kernel"),
        ("MemcpyD2D", "copies", "MemcpyD2D"),
        ("gemm_fusion_dot_general_3", "matrix products", "gemm_fusion_dot_general_3"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "matrix products", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>", "matrix products", "void cutlass::Kernel2<cutlass_80_tensorop>"),
        ("input_reduce_fusion_7", "other kernels of XLA", "input_reduce_fusion_7"),
        ("loop_" + "x" * 200, "other kernels of XLA", "loop_" + "x" * 95),
    ],
)
def test_names_tell_what_a_kernel_is(name, group, shown):
    assert timeline.classify(name) == (group, shown)


def test_kernels_one_after_the_other_leave_gaps():
    found = timeline.account([Event(130, 20, "loop_a"), Event(100, 10, "gemm"), Event(115, 10, "loop_a")])
    assert own(found) == {"loop_a": 30, "gemm": 10}
    assert (found.span_ns, found.gap_ns, found.longest_gap_ns, found.overlap_ns) == (50, 10, 5, 0)
    assert [(k.name, k.launches) for k in found.kernels] == [("loop_a", 2), ("gemm", 1)]


def test_an_instant_belongs_to_the_kernel_that_started_first():
    early, inside, late = Event(8, 12, "merge_fragments"), Event(3, 4, "loop_inside"), Event(20, 5, "gemm")
    found = timeline.account([Event(0, 10, READ), early, inside, late])
    assert own(found) == {"read_rows": 10, "merge_fragments": 10, "gemm": 5, "loop_inside": 0}
    assert (found.span_ns, found.gap_ns, found.overlap_ns) == (25, 0, 2 + 4)
    assert {k.name: k.duration_ns for k in found.kernels}["merge_fragments"] == 12


def test_transfers_on_another_stream_are_shown_and_not_counted():
    program = [Event(10, 10, "gemm"), Event(25, 10, READ)]
    found = timeline.account([Event(0, 100, SERVE), *program])
    assert (found.span_ns, found.gap_ns, found.overlap_ns) == (25, 5, 0)
    assert own(found) == {"serve_resident_kernel": 100, "gemm": 10, "read_rows": 10}
    # Streams of the program itself share the time.
    found = timeline.account([*program, Event(12, 15, "MemcpyD2D")])
    assert own(found) == {"gemm": 10, "MemcpyD2D": 7, "read_rows": 8} and found.gap_ns == 0
    with pytest.raises(ValueError, match="events: got 1, none of them a kernel of the program"):
        timeline.account([Event(0, 100, SERVE)])


def made_up(steps=CHUNK, layers=LAYERS, attends=True):
    """Of a layer 10 us: product 4, attention 3 with a merge that starts 1 early and ends 1 later, 2 of nothing."""
    events, at = [Event(0, steps * (layers * 10_000 + 5_000), SERVE)], 1_000
    for _ in range(steps):
        for _ in range(layers):
            events.append(Event(at, 4_000, "gemm_fusion_dot"))
            if attends:
                events += [Event(at + 4_000, 3_000, READ), Event(at + 6_000, 2_000, "merge_fragments")]
            at += 10_000
        events.append(Event(at, 5_000, "head_gemm"))
        at += 5_000
    return events


def test_one_layer_is_read_from_the_middle_of_a_step():
    layer = timeline.one_layer(made_up(16, 32), 16, 32)
    assert [(k["name"], k["start_us"], k["duration_us"]) for k in layer] == [
        ("read_rows", 0, 3), ("merge_fragments", 2, 2), ("gemm_fusion_dot", 6, 4), ("read_rows", 10, 3),
    ]  # fmt: skip
    layer = timeline.one_layer(made_up(16, 32, attends=False), 16, 32)
    assert [(k["name"], k["start_us"]) for k in layer] == [("gemm_fusion_dot", 0), ("gemm_fusion_dot", 10)]


def test_streams_of_gpus_are_read_from_a_trace(tmp_path):
    def plane(name, line):
        return (
            f'planes {{ name: "{name}" event_metadata {{ key: 1 value {{ id: 1 name: "read_rows" }} }} '
            f'lines {{ id: 1 name: "{line}" timestamp_ns: 1000 '
            "events { metadata_id: 1 offset_ps: 7000 duration_ps: 2000 } } }"
        )

    text = plane("/device:GPU:0", "Stream #13(Kernel)") + plane("/device:GPU:0", "XLA Ops") + plane("/host:CPU", "x")
    path = tmp_path / "one.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    assert list(timeline.read(path)) == [(1007, 2, "read_rows")]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asks for what a CPU lacks")
def test_a_trace_without_a_gpu_is_an_error():
    with pytest.raises(CloError, match="the profiler saw nothing on the GPU"):
        timeline.traced(lambda: jnp.ones(3).block_until_ready())


@pytest.mark.gpu
def test_a_trace_shows_the_kernels_of_a_gpu():
    work = jax.jit(lambda x: (x @ x).sum())
    x = jnp.ones((512, 512))
    work(x).block_until_ready()
    found = timeline.account(timeline.traced(lambda: work(x).block_until_ready()))
    assert found.span_ns == pytest.approx(found.gap_ns + sum(k.own_ns for k in found.kernels)) and found.kernels


def test_rows_of_every_policy_add_up(tmp_path):
    model = tiny.LLAMA
    subject = Subject("tiny", model, "float32", "random", True)
    clo = CloConfig(hash_bits=64, sink_tokens=4, recent_tokens=16, flush_tokens=8)
    pattern = replay.given(model, 0.75, 0.3)
    ways = tuple(variants(["clo"], (0.1,), clo, {}))
    plan = decode.Plan(subject, ways, (512,), (1,), 2 * CHUNK, CHUNK, pattern=pattern)
    traces = []

    def trace(work):
        assert len(work()[0]) == CHUNK  # the session has a chunk left for it
        traces.append(work)
        return made_up(layers=model.num_layers)

    kept = []
    rows, skipped = timeline.run(plan, lambda rows, skipped: kept.append(len(rows)), trace)
    assert len(traces) == len(kept) == 4 and skipped == {} and kept[-1] == len(rows)
    content = report.write(tmp_path / "x.json", "timeline", {}, rows)
    report.validate(json.loads((tmp_path / "x.json").read_text()))
    by_name = {row["name"]: row for row in content["rows"]}
    assert len(by_name) == len(rows)
    head = 5 / model.num_layers
    for policy in ("weights only", "full", "clo 10 %", "clo 10 % on the device"):
        value = {name.removeprefix(f"{policy}: "): row["value"] for name, row in by_name.items()}
        row = {name.removeprefix(f"{policy}: "): row for name, row in by_name.items()}
        assert value["matrix products"] == pytest.approx(4 + head) and value["attend"] == pytest.approx(4)
        assert value["attend: merge_fragments"] == pytest.approx(1)
        assert row["attend: merge_fragments"]["duration_us"] == pytest.approx(2)
        assert row["attend"]["launches"] == 2 and row["all"]["overlap_us"] == pytest.approx(1)
        assert value["gaps"] == pytest.approx(value["all"] - value["attend"] - value["matrix products"])
        assert value["step, traced"] * 1e3 == pytest.approx(value["all"] * model.num_layers)
        assert row["step, traced"]["control"] == value["step"] > 0
        assert value["transfer (beside them, not counted)"] == pytest.approx(value["all"])
        assert row["all"]["one_layer"][0] == {"name": "read_rows", "start_us": 0, "duration_us": 3}
    step = by_name["clo 10 %: step"]
    assert step["control"] == by_name["weights only: step"]["value"] and "control" not in by_name["weights only: step"]
    assert step["hits"] == "replayed" and 0 < step["hit_rate"] < 1 and step["new_rows"] > 0


def arguments(*more):
    return ["out.json", "--shape", "tiny", "--context", "2048", *more]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asks for what a GPU has")
def test_a_cpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        timeline.main(arguments())
    assert "JAX runs on cpu, wanted a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, message",
    [(("--context", "64"), "--context: got 64, wanted at least"), (("--shape", "gpt"), "--shape: got 'gpt'"),
     (("--batch", "0"), "--batch: got 0, wanted at least 1"), (("--attention", "fast"), "--attention: got 'fast'"),
     (("--kv-dtype", "int4"), "--kv-dtype: invalid choice: 'int4'")],
)  # fmt: skip
def test_wrong_calls_are_named(more, message, capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(SystemExit):
        timeline.main(arguments(*more))
    assert message in capsys.readouterr().err


def test_what_is_measured_is_what_was_asked_for(monkeypatch, tmp_path, capsys):
    asked = []

    def run(plan, keep):
        asked.append(plan)
        keep([report.Row("clo 10 %: gaps", 1.0, "us/layer")], {})
        return [report.Row("clo 10 %: gaps", 2.0, "us/layer")], {}

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timeline, "run", run)
    out = tmp_path / "t.json"
    options = ["--context", "2048", "--batch", "2", "--guess-from", "input", "--kv-dtype", "int8", "--layers", "2"]
    timeline.main([str(out), "--shape", "tiny", "--attention", "clo", *options])
    (plan,) = asked
    assert [way.name for way in plan.ways] == ["clo 10 %", "clo 10 % on the device"]
    clo = plan.variants[0].load["clo"]
    assert (clo.guess_from, clo.kv_dtype) == ("input", "int8")
    assert (plan.contexts, plan.batches, plan.subject.model.num_layers) == ((2048,), (2,), 2)
    assert plan.steps == plan.chunk * (timeline.TIMED_CHUNKS + 1)
    content = json.loads(out.read_text())
    assert content["what"] == "timeline" and content["rows"][0]["value"] == 2
    assert "| clo 10 %: gaps | 2 us/layer |" in capsys.readouterr().out
