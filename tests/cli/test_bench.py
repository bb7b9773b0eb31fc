"""clo-jax bench: runs at the smallest shape, results files, pictures, wrong calls."""

import dataclasses
import json

import pytest

from clo_jax.bench import report, ways
from clo_jax.cli import _bench_plots, bench
from tests import tiny, tiny_checkpoint

TINY = ("--shape", "tiny", "--layers", "2", "--dtype", "float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    small = dataclasses.replace(tiny.LLAMA, num_layers=2)
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"), small)


def results(path, what):
    """Rows by name of a results file, which is valid."""
    content = json.loads(path.read_text())
    report.validate(content)
    assert content["what"] == what
    return content, {row["name"]: row for row in content["rows"]}


def test_decode(run, tmp_path):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = run(
        "bench", "decode", *TINY, "--attention", "exact", "--lengths", "256", "--batches", "1,2", "--steps", "16",
        "--json", out, "--plot", picture,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "| context | full | exact 10 % |" in result.out and "| full, 256 tokens, batch 2 |" in result.out
    assert picture.read_bytes().startswith(b"\x89PNG") and "exact 10 %, 256 tokens" in result.err
    content, rows = results(out, "bench decode")
    assert content["args"]["model"] == "tiny, 2 of 3 layers" and content["args"]["weights"] == "random"
    assert set(rows) >= {"weights only, batch 2", "full, 256 tokens, batch 2", "exact 10 %, 256 tokens"}


def test_prefill(run, checkpoint, tmp_path):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = run(
        "bench", "prefill", checkpoint, "--lengths", "256", "--repeats", "2", "--json", out, "--plot", picture
    )  # fmt: skip
    assert result.code == 0, result.err
    content, rows = results(out, "bench prefill")
    clo, device = rows["clo 10 %, 256 tokens"], rows["clo 10 % on the device, 256 tokens"]
    assert clo["control_name"] == "clo 10 % on the device" and clo["control"] == device["value"]
    assert device["control_name"] == "full" and clo["value"] == pytest.approx(255 / clo["ttft_ms"] * 1000)
    assert content["args"]["weights"] == "checkpoint" and content["args"]["model"] == checkpoint.name
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_memory(run, tmp_path):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = run("bench", "memory", "--shape", "llama3-8b", "--batches", "1,4", "--json", out, "--plot", picture)
    assert result.code == 0, result.err
    _, rows = results(out, "bench memory")
    assert len(rows) == 2 * 6 * 6 and picture.read_bytes().startswith(b"\x89PNG")
    full = rows["full, 131072 tokens"]
    assert full["value"] == full["device_kv_bytes"] == 16 * 2**30 and full["host_kv_bytes"] == 0
    clo = rows["clo 10 %, 131072 tokens, batch 4"]
    assert sum(clo["device_kv_parts"].values()) == clo["value"] < 0.25 * clo["control"] == 0.25 * 4 * full["value"]


def test_memory_of_quantized_rows(run, tmp_path):
    out = tmp_path / "out.json"
    args = ("--shape", "llama3-8b", "--attention", "clo", "--lengths", "1048576", "--vary", "kv_dtype=fp8")
    result = run("bench", "memory", *args, "--json", out)
    assert result.code == 0, result.err
    _, rows = results(out, "bench memory")
    plain, byte = rows["clo 10 %, 1048576 tokens"], rows["clo 10 %, kv_dtype=fp8, 1048576 tokens"]
    assert byte["host_kv_bytes"] == plain["host_kv_bytes"] * 272 / 512 < 80 * 2**30


def test_memory_goes_as_far_as_the_model(run):
    result = run("bench", "memory", "--shape", "smollm2-135m", "--attention", "clo")
    assert result.code == 0 and [line for line in result.out.splitlines() if "8192" in line]
    assert "32768" not in result.out


def test_transfer(run, tmp_path):
    out = tmp_path / "out.json"
    result = run("bench", "transfer", "--backends", "host", "--threads", "1,2", "--json", out)
    assert result.code == 0, result.err
    content, rows = results(out, "bench transfer")
    for threads in (1, 2):
        assert rows[f"host, {threads} threads, scattered rows"]["ratio"] > 0
        assert rows[f"host, {threads} threads, one row from post to delivery"]["unit"] == "us"


@pytest.mark.parametrize(
    "args, named",
    [
        (["decode"], "--shape: got none, wanted a checkpoint or one of llama3-8b, qwen2.5-14b"),
        (["decode", "CKPT", "--shape", "tiny"], "--shape: got 'tiny' together with a checkpoint"),
        (["decode", "--shape", "gpt2"], "--shape: got 'gpt2', wanted llama3-8b"),
        (["decode", "--shape", "tiny", "--layers", "4"], "--layers: got 4, wanted 1 to 3"),
        (["decode", *TINY, "--attention", "dense"], "--attention: got 'dense', wanted full, clo"),
        (["decode", *TINY, "--lengths", "1M"], "--lengths: got '1M', wanted integers"),
        (["decode", *TINY, "--lengths", "65536"], "--lengths: got 65536, wanted 2 to 32768, the limit of tiny"),
        (["decode", *TINY, "--batches", "0"], "--batches: got 0, wanted at least 1"),
        (["decode", *TINY, "--hit-rate", "0.5"], "--hits: got real with --hit-rate, wanted replayed"),
        (["decode", *TINY, "--hits", "replayed", "--trace", "x", "--new-rows", "0"], "--trace: got it with --hit-rate"),
        (["decode", *TINY, "--planner", "paper"], "--planner: got it with a --shape, wanted a checkpoint"),
        (["decode", *TINY, "--transformers", "x.gguf"], "--transformers: got it with a --shape"),
        (["prefill", *TINY, "--repeats", "0"], "--repeats: got 0, wanted a positive integer"),
        (["decode", *TINY, "--attention", "exact", "--vary", "retain=1"], "--vary: got 'retain=1' without clo"),
        (["memory", *TINY, "--lengths", ""], "--lengths: got none, wanted at least one"),
        (["layer", "--shape", "tiny", "--layers", "2", "--context", "99999"], "--context: got 99999, wanted 132 to"),
        (["transfer", "--backends", "dma"], "--backends: got 'dma', wanted pull, bar, staged, host"),
        (["ablation", "CKPT", "--prompts", "0"], "--prompts: got 0"),
    ],
)
def test_wrong_calls_are_named(run, checkpoint, args, named):
    result = run("bench", *(str(checkpoint) if arg == "CKPT" else arg for arg in args))
    assert result.code == 2 and named in result.err


def test_a_model_that_no_memory_holds_is_refused(run, monkeypatch):
    from clo_jax import memory

    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1 << 30)
    monkeypatch.setattr(memory, "device", lambda: None)
    result = run("bench", "decode", "--shape", "llama3-8b")
    assert result.code == 1 and "not enough memory. In host memory: need 14.96 GiB (parameters" in result.err
    assert "Take a smaller --shape or fewer --layers" in result.err


def test_every_bench_has_help(run):
    names = {command.callback.__name__ for command in bench.app.registered_commands}
    assert names == {"decode", "prefill", "memory", "layer", "transfer", "ablation"}
    for name in names:
        assert run("bench", name, "--help").code == 0


def test_in_pictures_a_policy_with_other_settings_is_a_line_of_its_own():
    names = ["clo 10 %", "clo 10 %, kv_dtype=int8", "clo 10 %, kv_dtype=int8 on the device"]
    rows = [{"name": ways.title(name, n, b), "context": n} for name in names for n in (8, 16) for b in (1, 2)]
    assert {name: len(own) for name, own in _bench_plots._series(rows).items()} == dict.fromkeys(names, 4)
