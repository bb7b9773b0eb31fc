"""Results files: one schema, verdicts that follow from figures, and a README that says what they say."""

import json
import pathlib

import pytest

from clo_jax.bench import report, tables

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(report.RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_results_file_is_valid(path):
    report.validate(json.loads(path.read_text()))


def test_readme_holds_the_measured_table():
    content = json.loads((report.RESULTS / "cpu-decode.json").read_text())
    readme = (ROOT / "README.md").read_text()
    assert tables.throughput(content) in readme
    assert content["commit"] in readme and content["hardware"]["cpu"] in readme


def row(**changes):
    base = dict(name="pull", value=51.2, unit="GB/s", control_name="memcpy", control=55.3, goal=">= 0.90")
    return report.Row(**{**base, **changes})


def test_goals_speak_of_ratio_or_value():
    assert row().to_dict()["met"] and not row(value=49.0).to_dict()["met"]
    assert row(goal="<= 60 GB/s").to_dict()["met"] and not row(goal="<= 50 GB/s").to_dict()["met"]
    assert "met" not in row(goal=None).to_dict()
    assert row(goal="== 51.2 GB/s").to_dict()["met"] and row(goal="> 51 GB/s").to_dict()["met"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"goal": "fast"}, "got 'fast'"),
        ({"goal": "<= 18 us"}, "got unit 'us', wanted 'GB/s'"),
        ({"control": None}, "speaks of a ratio"),
    ],
)
def test_goals_that_cannot_be_judged_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        row(**changes).to_dict()


def test_written_files_hold_what_a_reader_needs(tmp_path):
    path = tmp_path / "sub" / "cpu-x.json"
    content = report.write(path, "x", {"a": 1}, [row(more={"batch": 4})])
    assert json.loads(path.read_text()) == content
    assert content["rows"][0]["batch"] == 4 and content["rows"][0]["ratio"] == pytest.approx(51.2 / 55.3)
    assert {"cpu", "cores", "memory_gib"} <= set(content["hardware"]) and "jax" in content["versions"]
    assert "/" not in content["command"]
    assert "| pull | 51.2 GB/s | 55.3 (memcpy) | 0.926 | >= 0.90 (met) |" in report.markdown(content)


def test_commands_keep_of_a_path_its_last_part():
    given = ["clo-jax", "bench", "decode", "/home/me/models/smollm2/", "--lengths", "1,2", "--json=/tmp/out.json", "-x"]
    assert report.command(given) == "clo-jax bench decode smollm2 --lengths 1,2 --json=out.json -x"


def test_rows_of_policies_hold_all_fields_of_their_bench(tmp_path):
    fields = {"attention": "clo", "context": 8, "batch": 1, "device_kv_bytes": 4, "host_kv_bytes": 0}
    content = report.make("bench memory", {}, [row(more=fields | {"device_kv_parts": {}}), row()])
    del content["rows"][0]["host_kv_bytes"]
    with pytest.raises(ValueError, match="'pull': host_kv_bytes: got None, wanted int"):
        report.validate(content)
    for field, value in (("batch", "one"), ("device_kv_bytes", None)):
        with pytest.raises(ValueError, match=f"{field}: got {value!r}, wanted int"):
            report.make("bench memory", {}, [row(more=fields | {"device_kv_parts": {}, field: value})])


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda c: c.pop("commit"), "commit"),
        (lambda c: c.update(schema_version=2), "schema_version: got 2"),
        (lambda c: c.update(rows=[]), "rows: got none"),
        (lambda c: c["rows"][0].update(ratio=1.0), "is not value / control"),
        (lambda c: c["rows"][0].update(met=False), "does not follow"),
        (lambda c: c["rows"][0].pop("unit"), "wanted name, value and unit"),
    ],
)
def test_figures_that_were_typed_are_noticed(tmp_path, break_it, message):
    content = report.write(tmp_path / "x.json", "x", {}, [row()])
    break_it(content)
    with pytest.raises(ValueError, match=message):
        report.validate(content)


def test_arguments_say_nothing_of_the_folders_of_a_machine(tmp_path):
    given = {"described": [{"calibration": "/home/somebody/model/calibration"}], "text": "a/b", "n": 3}
    content = report.write(tmp_path / "found.json", "test", given, [report.Row("one", 1.0, "s")])
    assert content["args"] == {"described": [{"calibration": "model/calibration"}], "text": "a/b", "n": 3}
