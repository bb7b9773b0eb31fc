"""The docs' figures: series are what rows say, pictures are made of them, absent files are skipped, thin ones named."""

import json
import sys

import pytest

from clo_jax.bench import ablation_speed, figures, report, timeline
from clo_jax.bench import figure_series as series
from clo_jax.bench.decode import WEIGHTS_ONLY
from clo_jax.bench.headline import CLO, FP8, FULL, INT8, INT8_EARLY, ON_DEVICE
from clo_jax.bench.ways import title

LARGEST = 80 * 1024  # bytes of a PNG


def content(rows, **args):
    """A results file of a GPU."""
    made = report.make("test", args, rows)
    return made | {"hardware": {"gpus": ["NVIDIA H200, 580.1"], "cpu": "a CPU"}}


def of_policy(name, context, batch, value=1.0, device=2**30):
    more = {"attention": name.split()[0], "context": context, "batch": batch, "device_kv_bytes": device}
    return report.Row(title(name, context, batch), value, "tokens/s", more=more)


def growth():
    return content(
        [
            report.Row("memory read rate", 3700.0, "GB/s"),
            *(of_policy(FULL, n, 1, 2e6 / n) for n in (131072, 32768)),
            *(of_policy(name, n, 1, 3e6 / n) for name in (CLO, ON_DEVICE, FP8) for n in (32768, 131072)),
            of_policy(CLO, 32768, 4, 400.0),
            report.Row("step, clo 10 %, 131072 tokens, batch 1", 8.0, "ms"),
        ],
        model="llama3-8b", dtype="bfloat16", hits="replayed: 0.79",
    )  # fmt: skip


def batches():
    return content(
        [of_policy(name, 131072, n, 90.0 * n) for name in (FULL, CLO, INT8) for n in (1, 2)]
        + [of_policy(INT8, 131072, 8, 500.0), of_policy(CLO, 1024, 16, 999.0)]
    )


def early():
    return content([of_policy(name, 131072, n, 120.0 * n) for name in (FULL, INT8_EARLY) for n in (1, 8)])


def parts(name, **times):
    """Rows of a timeline: groups, a kernel of one of them, what adds up to all."""
    rows = [report.Row(f"{name}: step", 8.0, "ms"), report.Row(f"{name}: all", sum(times.values()), "us/layer")]
    rows += [report.Row(f"{name}: {part.replace('_', ' ')}", time, "us/layer") for part, time in times.items()]
    kernel = report.Row(f"{name}: attend: read_rows", 1.0, "us/layer")
    return [*rows, kernel, report.Row(f"{name}: transfer (beside them, not counted)", 99.0, "us/layer")]


def layers():
    rows = parts(WEIGHTS_ONLY, matrix_products=150.0, other_kernels_of_XLA=20.0, copies=1.0, gaps=9.0)
    rows += parts("infinigen 10 %", attend=40.0, gaps=400.0)
    for name in (FULL, CLO, ON_DEVICE):
        rows += parts(name, attend=50.0, prefetch=20.0, offload=2.0, matrix_products=150.0, gaps=5.0)
    return content(rows)


def rate(name, value):
    return report.Row(name, value, "GB/s", "contiguous copy", 55.0)


def transfers():
    return content(
        [
            report.Row("contiguous copy, pinned host memory to the device", 54.0, "GB/s"),
            rate("pull, resident, 4 blocks: 512-byte rows, 10 % of 128K tokens x 8 heads", 51.0),
            rate("pull beside an HBM-bound kernel", 50.0),
            rate("offload of a layer: 128K tokens x 8 heads", 52.0),
            rate("bar, 4 threads: the same rows", 17.0),
            rate("bar, 1 threads: the same rows", 5.0),
            report.Row("bar, one row a head: post to ready", 19.0, "us"),
        ]
    )


def memory():
    sizes = ((FULL, 2**34), (CLO, 2**32), (INT8, 2**31))
    rows = [of_policy(name, n, b, device=size * b) for b in (8, 2) for n in (65536, 32768) for name, size in sizes]
    return content(rows)


def without_batch():
    return content([report.Row("full, 8 tokens", 1.0, "bytes", more={"attention": "full"})])


def ablated(names=("uniform", "+T", "+T +G", "+T +G +P", "uniform +G")):
    rows = [report.Row("answers right, full", 99, "answers")]
    for n, name in enumerate(names, 1):
        rows += [
            report.Row(f"hit rate, {name}", n / 10, "share", more={"decode_steps": 10}),
            report.Row(f"rows moved / rows selected, {name}", 0.5, "share", more={"rows_selected": 4000 // n}),
            report.Row(f"rows moved a token, {name}", 200 / n, "rows"),
        ]
    return content(rows, checkpoint="models/smollm2", dtype="auto")


def ablation_steps(parts=ablation_speed.PARTS):
    """The plan of the fourth part leaves the heads where they were."""
    rows = [report.Row(f"step, {control}", ms, "ms") for control, ms in ((WEIGHTS_ONLY, 4.1), (FULL, 8.1))]
    for n, name in enumerate(parts, 1):
        timed = name if name != "+T +G +P" else "+T +G"
        for sets, ms in ((ablation_speed.WHOLE, 20.0), (ablation_speed.DELTA, 10.0)):
            more = {"part": name, "timed_as": timed, "sets": sets}
            value = ms / (n if timed == name else n - 1)
            rows.append(report.Row(f"step, {name}, {sets}", value, "ms", more=more))
    return content(rows, model="llama3-8b", dtype="bfloat16", hits="replayed: those of each part")


FILES = {
    "h200-growth.json": growth, "h200-128k.json": batches, "h200-early.json": early, "h200-timeline.json": layers,
    "h200-transfer.json": transfers, "h200-memory.json": memory, "smollm2-ablation.json": ablated,
    "h200-ablation.json": ablation_steps,
}  # fmt: skip


@pytest.fixture
def folders(tmp_path):
    """Of made-up files and of pictures."""
    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir()
    out.mkdir()
    for file, made in FILES.items():
        (results / file).write_text(json.dumps(made()))
    return results, out


def run(results, out):
    figures.main(["--results", str(results), "--out", str(out)])


def shipped(name):
    return json.loads((report.RESULTS / name).read_text())


def test_throughput_by_context_and_batch():
    found = series.by_context(growth())
    assert found.where == "batch 1" and list(found.lines) == [FULL, CLO, FP8]
    assert found.lines[FULL] == [(32768, 2e6 / 32768), (131072, 2e6 / 131072)]
    found = series.by_batch(batches())
    assert found.where == "131,072 tokens" and found.lines[CLO] == [(1, 90.0), (2, 180.0)]
    assert found.lines[INT8][-1] == (8, 500.0) and list(found.lines) == [FULL, CLO, INT8]
    found = series.by_batch_early(early())
    assert found.where == "131,072 tokens" and found.lines == {INT8_EARLY: [(1, 120.0), (8, 960.0)]}


def test_parts_of_a_layer_add_up():
    found = series.layer_parts(layers())
    assert list(found) == [WEIGHTS_ONLY, FULL, CLO, ON_DEVICE, "infinigen 10 %"]
    assert found[WEIGHTS_ONLY] == {
        "attend": 0, "prefetch": 0, "offload": 0, "matrix products": 150, "other kernels": 21, "gaps": 9
    }  # fmt: skip
    assert list(found[CLO].values()) == [50, 20, 2, 150, 0, 5]
    assert set(series.PARTS) == {*timeline.OURS, *timeline.THEIRS, timeline.XLA, "gaps"} - {timeline.TRANSFER}


def test_a_part_that_is_not_shown_is_noticed():
    made = layers()
    made["rows"] = [row for row in made["rows"] if row["name"] != f"{CLO}: prefetch"]
    with pytest.raises(ValueError, match=r"clo 10 %: got parts of .*, wanted the 227.0 us of all"):
        series.layer_parts(made)


def test_bandwidth_by_threads():
    found = series.bandwidth(transfers())
    assert found == (131072, {"bar": [(1, 5.0), (4, 17.0)]}, {"pull, resident, 4 blocks": 51.0}, {}, 55.0)


def test_bandwidth_by_length_where_there_are_several():
    made = transfers()
    short = rate("bar, 4 threads: 512-byte rows, 10 % of 4K tokens x 8 heads", 15.0).to_dict()
    longer = report.Row("bar, 4 threads, scattered rows", 18.0, "GB/s", "copy", 50.0, more={"context": 262144})
    made["rows"] += [short, longer.to_dict()]
    found = series.bandwidth(made)
    assert found.by_length == {"bar, 4 threads": [(4096, 15.0), (131072, 17.0), (262144, 18.0)]}
    assert found.length == 262144 and found.by_threads == {"bar": [(4, 18.0)]} and found.without == {}


def test_device_bytes_of_each_policy_at_the_smallest_batch():
    found = series.device_bytes(memory())
    assert found.where == "batch 2" and list(found.lines) == [FULL, CLO, INT8]
    assert found.lines[CLO] == [(32768, 2**33), (65536, 2**33)]


def test_ablation_has_what_moves_and_what_whole_sets_would():
    found = series.ablation(ablated())
    assert list(found) == ["uniform", "uniform +G", "+T", "+T +G", "+T +G +P"]
    assert found["+T"] == (200, 100, 0.2)


def test_ablation_in_time_by_part_and_sets():
    found = series.ablation_speed_steps(ablation_steps())
    assert list(found.parts) == ["uniform", "+T", "+T +G = +T +G +P", "+T +G +P, nothing hidden"]
    assert found.parts["+T"] == {"whole sets": 10.0, "delta": 5.0}
    assert found.controls == {FULL: 8.1, WEIGHTS_ONLY: 4.1}


def test_shipped_files():
    found = series.bandwidth(shipped("h200-transfer.json"))
    threads = {name: [n for n, _ in line] for name, line in found.by_threads.items()}
    assert threads == {"bar": [1, 2, 4, 8], "staged": [4, 16]}
    assert set(found.without) == {"pull, resident, 4 blocks", "pull, in line, 8 blocks"}
    assert max(found.without.values()) < found.copy and found.length == 131072 and not found.by_length
    rows = {row["name"]: row["value"] for row in shipped("smollm2-ablation.json")["rows"]}
    parts = series.ablation(shipped("smollm2-ablation.json"))
    assert len(parts) == 6
    for name, part in parts.items():
        assert part.moved == rows[f"rows moved a token, {name}"] and part.hit_rate == rows[f"hit rate, {name}"]
        assert part.moved / part.selected == pytest.approx(rows[f"rows moved / rows selected, {name}"])


def test_all_figures_are_drawn_alike_each_time(folders, capsys):
    results, out = folders
    run(results, out)
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(first) == {f"{name}.png" for name in figures.DRAWINGS}
    assert all(png.startswith(b"\x89PNG") and len(png) <= LARGEST for png in first.values())
    assert "skipped" not in capsys.readouterr().err
    run(results, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first


def test_a_figure_by_length_is_drawn(folders):
    results, _ = folders
    made = transfers()
    made["rows"].append(rate("bar, 4 threads: 10 % of 4K tokens", 15.0).to_dict())
    without = figures.draw(figures.DRAWINGS["bandwidth"], results)
    (results / "h200-transfer.json").write_text(json.dumps(made))
    assert without != figures.draw(figures.DRAWINGS["bandwidth"], results)


def test_pictures_of_shipped_files():
    there = [d for d in figures.DRAWINGS.values() if all((report.RESULTS / file).exists() for file in d.sources)]
    assert len(there) >= len(figures.DRAWINGS) - 1
    for drawing in there:
        png = figures.draw(drawing, report.RESULTS)
        assert png.startswith(b"\x89PNG") and len(png) <= LARGEST


def test_settings_of_the_user_do_not_show(folders):
    import matplotlib

    results, _ = folders
    plain = figures.draw(figures.DRAWINGS["ablation"], results)
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black"}):
        assert figures.draw(figures.DRAWINGS["ablation"], results) == plain
        assert matplotlib.rcParams["font.size"] == 20


def test_absent_files_are_skipped_by_name(folders, capsys):
    results, out = folders
    (results / "h200-growth.json").unlink()
    (results / "h200-memory.json").unlink()
    run(results, out)
    told = capsys.readouterr().err
    assert "throughput.png: skipped, there is no h200-growth.json\n" in told
    assert "memory.png: skipped, there is no h200-memory.json\n" in told
    assert {path.stem for path in out.iterdir()} == {"breakdown", "bandwidth", "ablation", "ablation-speed"}


@pytest.mark.parametrize(
    "file, made, figure, message",
    [
        ("h200-growth.json", lambda: content([of_policy(FULL, 8, 1)]), "throughput", "got no rows of 'clo 10 %',"),
        ("h200-128k.json", transfers, "throughput", "got no rows of 'full', 'clo 10 %',"),
        ("h200-early.json", batches, "throughput", f"got no rows of '{INT8_EARLY}',"),
        ("h200-timeline.json", lambda: content(parts(FULL, gaps=1.0)), "breakdown", "got no rows of 'weights only',"),
        ("h200-transfer.json", ablated, "bandwidth", "got no rows of a transfer backend"),
        ("h200-memory.json", transfers, "memory", "got no rows of 'full', 'clo 10 %',"),
        ("h200-memory.json", without_batch, "memory", "got a row without 'batch'"),
        ("smollm2-ablation.json", lambda: ablated(("uniform", "+T")), "ablation", "got no rows of '+T +G', '+T +G +P'"),
        ("smollm2-ablation.json", lambda: {}, "ablation", "schema_version: got None"),
        ("h200-ablation.json", ablated, "ablation-speed", "got no rows of 'step, full', 'step, weights only',"),
        (
            "h200-ablation.json", lambda: ablation_steps(("uniform",)), "ablation-speed",
            "got no rows of 'step, +T, whole sets', 'step, +T, delta',"
        ),
    ],
)  # fmt: skip
def test_a_file_that_lacks_rows_is_named_and_others_are_drawn(folders, capsys, file, made, figure, message):
    results, out = folders
    (results / file).write_text(json.dumps(made()))
    with pytest.raises(SystemExit) as stopped:
        run(results, out)
    assert stopped.value.code == 1 and f"{figure}.png: {file}: {message}" in capsys.readouterr().err
    assert len(list(out.iterdir())) == len(figures.DRAWINGS) - 1


def test_folders_that_are_none_are_named(folders, capsys):
    results, out = folders
    for option, given in (("--results", (results / "none", out)), ("--out", (results, out / "none"))):
        with pytest.raises(SystemExit) as stopped:
            run(*given)
        assert stopped.value.code == 2 and f"{option}: got" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(folders, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        run(*folders)
    assert stopped.value.code == 1 and "pip install 'clo-jax[plot]'" in capsys.readouterr().err
