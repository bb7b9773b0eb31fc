"""Transformers as a rival: what it asks for, and with torch its steps at a tiny shape on the CPU."""

import dataclasses
import json
import pathlib
import sys

import pytest

from clo_jax.bench import report, transformers_decode
from clo_jax.bench.subject import find
from clo_jax.errors import MemoryPlanError

TINY = ("--shape", "tiny", "--layers", "2", "--dtype", "float32", "--context", "256")
CLO = "clo 10 %, 256 tokens"
IN_MEMORY, OFFLOADED = (f"transformers, {cache}, 256 tokens" for cache in ("cache in host memory", "offloaded cache"))


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        transformers_decode.main(["out.json", *arguments])
    assert exit.value.code == 2
    return capsys.readouterr().err


def measured(path, name=CLO, **more):
    """A results file with one step of 0.5 ms."""
    more = {"model": "tiny, 2 of 3 layers", "dtype": "float32", "step_ms": 0.5} | more
    report.write(path, "headline", {}, [report.Row(name, 2000.0, "tokens/s", more=more)])
    return path


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_what_is_not_installed_is_named(library, monkeypatch, capsys):
    if library == "transformers":
        monkeypatch.setitem(sys.modules, "torch", object())
    monkeypatch.setitem(sys.modules, library, None)
    assert f"{library}: not installed: pip install torch 'clo-jax[parity]'" in refused(capsys, *TINY)
    with pytest.raises(RuntimeError, match=f"^{library}: not installed"):
        transformers_decode.rates(pathlib.Path("x.gguf"), [1], 2, 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--steps", "2"), "--steps: got 2, wanted more than 2"),
        (("--context", "8"), "--context: got 8, wanted more than the 8 steps, up to 32768"),
        (("--context", "32769"), "--context: got 32769"),
        (("--shape", "huge"), "--shape: got 'huge'"),
        (("--layers", "4"), "--layers: got 4"),
        (("--compare", "not_here.json"), "not_here.json"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert message in refused(capsys, *TINY, *arguments)


def test_wrong_results_to_compare_with(tmp_path, capsys):
    path = tmp_path / "headline.json"
    for text in ("{", "{}"):
        path.write_text(text)
        assert "wanted a results file" in refused(capsys, *TINY, "--compare", str(path))
    measured(path, "clo 10 %, 512 tokens")
    assert f"has no row '{CLO}' with a step_ms" in refused(capsys, *TINY, "--compare", str(path))
    measured(path, dtype="bfloat16")
    wanted = "got a step of tiny, 2 of 3 layers in bfloat16, wanted tiny, 2 of 3 layers in float32"
    assert wanted in refused(capsys, *TINY, "--compare", str(path))


def test_only_a_lack_of_memory_is_a_reason():
    for message in ("CUDA out of memory. Tried to allocate 2 GiB.\nmore", "DefaultCPUAllocator: can't allocate memory"):
        assert transformers_decode.why_it_does_not_fit(RuntimeError(message)) == message.splitlines()[0]
    assert transformers_decode.why_it_does_not_fit(MemoryPlanError("too little")) == "too little"
    with pytest.raises(RuntimeError, match="illegal"):
        transformers_decode.why_it_does_not_fit(RuntimeError("an illegal memory access was encountered"))


@pytest.fixture
def on_a_cpu(monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return torch, transformers


@pytest.mark.live
def test_steps(on_a_cpu, tmp_path, capsys):
    torch, transformers = on_a_cpu
    out, compared = tmp_path / "out.json", measured(tmp_path / "headline.json")
    transformers_decode.main([str(out), *TINY, "--steps", "5", "--compare", str(compared)])
    content = json.loads(out.read_text())
    report.validate(content)
    args, (row,) = content["args"], content["rows"]
    assert content["what"] == "transformers" and args["model"] == "tiny, 2 of 3 layers"
    assert (args["torch"], args["transformers"]) == (str(torch.__version__), transformers.__version__)
    assert "no CUDA device" in args["skipped"][OFFLOADED]
    assert row["name"] == IN_MEMORY and row["unit"] == "ms" and row["repeats"] == 3
    assert 0 < row["min"] <= row["value"] <= row["max"]
    assert row["control_name"] == f"step, {CLO}, batch 1" and row["control"] == 0.5
    assert row["kv_bytes"] == 2 * 2 * 2 * 256 * 64 * 4 and row["peak_device_bytes"] is None
    assert f"| {IN_MEMORY} |" in capsys.readouterr().out


@pytest.mark.live
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_model_is_the_shape_and_each_step_adds_its_rows(architecture, on_a_cpu, monkeypatch):
    torch, transformers = on_a_cpu
    tiny = find(None, "tiny", None, "float32")
    model = dataclasses.replace(tiny.model, architecture=architecture, qkv_bias=architecture == "qwen2")
    subject = dataclasses.replace(tiny, model=model)
    made = transformers_decode.random_model(subject, "cpu")
    assert made.config.model_type == architecture and made.config._attn_implementation == "sdpa"
    matrices = [p for p in made.parameters() if p.ndim == 2]
    assert sum(p.nbytes for p in matrices) == subject.weight_bytes
    assert all(p.dtype == torch.float32 and p.std() > 0.01 for p in matrices)
    caches, make = [], transformers.DynamicCache
    monkeypatch.setattr(transformers, "DynamicCache", lambda **given: caches.append(make(**given)) or caches[-1])
    times, peak = transformers_decode.steps_ms(made, 100, 6, offloading=False)
    assert len(times) == 4 and min(times) > 0 and peak is None
    assert [layer.keys.shape for layer in caches[0].layers] == [(1, 2, 100, 64)] * 3


@pytest.mark.live
def test_greedy_steps_are_those_of_generate(on_a_cpu):
    torch, transformers = on_a_cpu
    model = transformers_decode.random_model(find(None, "tiny", None, "float32"), "cpu")
    prompt = torch.arange(20)[None]
    step, cache = transformers_decode.greedy(model), transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        tokens = [step(prompt, cache)]
        for _ in range(7):
            tokens.append(step(tokens[-1], cache))
        model.generation_config.eos_token_id = None  # both go on, whatever they say
        mask = torch.ones_like(prompt)
        wanted = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=8)
    assert torch.cat(tokens, 1).tolist() == wanted[:, 20:].tolist()


@pytest.mark.live
def test_what_does_not_fit_is_skipped(on_a_cpu, monkeypatch):
    """The course of a run on a GPU, with made-up steps."""
    torch, _ = on_a_cpu

    def measure(model, context, steps, offloading):
        if not offloading:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return [3.0, 1.0, 2.0], 4096

    subject, kept = find(None, "tiny", 2, "float32"), []
    monkeypatch.setattr(transformers_decode, "random_model", lambda subject, device: device)
    monkeypatch.setattr(transformers_decode, "steps_ms", measure)
    with pytest.raises(MemoryPlanError, match="^nothing fits. CUDA out of memory"):
        transformers_decode.run(subject, 256, 5, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    (row,), skipped = transformers_decode.run(subject, 256, 5, 0.5, lambda *found: kept.append(found))
    assert skipped == {"transformers, cache in GPU memory, 256 tokens": "CUDA out of memory."}
    assert row.name == OFFLOADED and row.to_dict()["ratio"] == 4 and row.more["peak_device_bytes"] == 4096
    assert kept == [([row], skipped)]
