"""clo-jax generate: which options reach the model, and what is printed where."""

import io
import json
import typing

import pytest

from clo_jax.cli import _console
from clo_jax.config import Attention, CloConfig
from clo_jax.rivals import RIVALS


def options(llm, what):
    (call,) = [call for call in llm.calls if call[0] == what]
    return call[-1]


def test_answer_on_stdout_everything_else_on_stderr(run, llm):
    result = run("generate", "ckpt", "--prompt", "how are you")
    assert (result.code, result.out) == (0, "all is well\n")
    assert "using the checkpoint's chat template" in result.err
    assert "7 prompt tokens, 3 new tokens (stop), first after 0.50 s, 10.0 tokens/s" in result.err
    assert "retriever sign, head scores neutral, " in result.err
    assert "hit rate 0.50, 40 rows moved by host, KV 2.00 KiB on the device, 1.00 MiB on the host" in result.err
    assert llm.calls[-1] == ("close",)


@pytest.mark.parametrize(
    "args", [["--quiet", "generate", "c", "--prompt", "x"], ["generate", "c", "--prompt", "x", "--quiet"]]
)
def test_quiet_leaves_stderr_empty(run, llm, args):
    result = run(*args)
    assert (result.code, result.out, result.err) == (0, "all is well\n", "")


def test_defaults(run, llm):
    run("generate", "ckpt", "--prompt", "hi")
    load = options(llm, "load")
    assert load == {
        "dtype": "auto",
        "max_context": None,
        "max_batch": 1,
        "attention": "clo",
        "pinning": _console.pinning,
    }
    assert options(llm, "generate") == {
        "max_new_tokens": None,
        "stop_token_ids": (),
        "ignore_eos": False,
        "do_sample": False,
        "seed": 0,
        "chat": True,
    }


def test_every_clo_flag_reaches_the_configuration(run, llm):
    flags = "--sparsity 0.2 --retriever hata --kv-dtype int8 --guess-from input --refresh delta --retain 2"
    flags += " --sim-threshold 1 --importance-power 2"
    flags += " --reuse-margin 0.05 --hash-bits 128 --sink-tokens 8 --recent-tokens 32 --no-kv-offload --backend host"
    flags += " --calibration elsewhere"
    run(
        "generate",
        "ckpt",
        "--prompt",
        "hi",
        *(flags + " --transfer-threads 3 --dtype float32 --max-context 50").split(),
    )
    assert options(llm, "load") == {
        "dtype": "float32",
        "max_context": 50,
        "max_batch": 1,
        "pinning": _console.pinning,
        "attention": "clo",
        "kv_offload": False,
        "backend": "host",
        "transfer_threads": 3,
        "calibration": "elsewhere",
        "clo": CloConfig(
            sparsity=0.2,
            retriever="hata",
            kv_dtype="int8",
            guess_from="input",
            refresh="delta",
            retain=2.0,
            sim_threshold=1.0,
            importance_power=2.0,
            reuse_margin=0.05,
            hash_bits=128,
            sink_tokens=8,
            recent_tokens=32,
        ),
    }


@pytest.mark.parametrize(
    "flags, config",
    [
        (["--preset", "paper"], CloConfig.paper()),
        (["--preset", "paper", "--sparsity", "0.3"], CloConfig.paper(sparsity=0.3)),
        (["--preset", "paper", "--refresh", "delta", "--retain", "2"], CloConfig.paper(refresh="delta", retain=2.0)),
        (["--refresh", "whole"], CloConfig(refresh="whole", retain=1.0)),
    ],
)
def test_presets_and_implied_settings(run, llm, flags, config):
    run("generate", "ckpt", "--prompt", "hi", *flags)
    assert options(llm, "load")["clo"] == config


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--attention", "full", "--sparsity", "0.2", "--hash-bits", "64", "--no-kv-offload"],
            "--attention full: got --sparsity, --hash-bits, --no-kv-offload, wanted no CLO flags",
        ),
        (["--attention", "full", "--preset", "paper"], "--attention full: got --preset, wanted no CLO flags"),
        (
            ["--attention", "exact", "--retain", "2"],
            "--attention exact: got --retain, wanted no CLO flags but --sparsity",
        ),
        (["--sparsity", "0"], "sparsity: got 0.0, wanted a number in (0, 1]"),
        (
            ["--kv-dtype", "fp8", "--retriever", "exact"],
            "kv_dtype: got 'fp8', wanted auto with retriever exact, which reads whole keys",
        ),
        (["--refresh", "whole", "--retain", "2"], "retain: got 2.0, wanted 1 when refresh is whole"),
        (
            ["--temperature", "0.7", "--top-k", "5"],
            "--do-sample: not given, wanted together with --temperature, --top-k",
        ),
        (["--json", "--stream"], "--json, --stream: got both, wanted at most one"),
        (["--prompt-file", "x"], "--prompt, --prompt-file: got both, wanted exactly one"),
    ],
)
def test_refused_before_anything_is_loaded(run, llm, flags, message):
    result = run("generate", "ckpt", "--prompt", "hi", *flags)
    assert result.code == 2
    assert message in result.err
    assert llm.calls == []


def test_without_calibration(run, llm):
    run("generate", "ckpt", "--prompt", "hi", "--calibration", "none")
    assert options(llm, "load")["calibration"] is None


def test_full_attention(run, llm):
    run("generate", "ckpt", "--prompt", "hi", "--attention", "full")
    assert options(llm, "load")["attention"] == "full"
    assert "clo" not in options(llm, "load")


@pytest.mark.parametrize("name", RIVALS)
def test_rival_policies(run, llm, name):
    run("generate", "ckpt", "--prompt", "hi", "--attention", name, "--sparsity", "0.2")
    assert options(llm, "load")["attention"] == name
    assert options(llm, "load")["rival"] == RIVALS[name](sparsity=0.2)
    assert name in typing.get_args(Attention)


def test_sampling_and_stop_tokens(run, llm):
    flags = "--do-sample --temperature 0.7 --top-k 5 --top-p 0.9 --seed 3 --stop-token-id 4 --stop-token-id 5"
    run("generate", "ckpt", "--prompt", "hi", "--ignore-eos", "--max-new-tokens", "12", "--no-chat", *flags.split())
    assert options(llm, "generate") == {
        "max_new_tokens": 12,
        "stop_token_ids": (4, 5),
        "ignore_eos": True,
        "do_sample": True,
        "seed": 3,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "chat": False,
    }


def test_prompt_from_a_file_and_from_stdin(run, llm, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n", encoding="utf-8")
    run("generate", "ckpt", "--prompt-file", file)
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    run("generate", "ckpt", "--prompt-file", "-")
    assert [call[1] for call in llm.calls if call[0] == "generate"] == ["Grüße\n", "from stdin"]


@pytest.mark.parametrize(
    "flags, code, message",
    [
        ([], 2, "--prompt, --prompt-file: got none, wanted exactly one"),
        (["--prompt", ""], 2, "--prompt: got an empty prompt, wanted text"),
        (["--prompt-file", "not-there"], 1, "No such file or directory: 'not-there'"),
    ],
)
def test_missing_prompts(run, llm, flags, code, message):
    result = run("generate", "ckpt", *flags)
    assert result.code == code
    assert message in result.err


def test_chat_template_is_refused_or_left_out_when_there_is_none(run, llm):
    llm.tokenizer = type(llm.tokenizer)(has_chat_template=False)
    assert run("generate", "ckpt", "--prompt", "hi", "--chat").code == 2
    result = run("generate", "ckpt", "--prompt", "hi")
    assert result.code == 0 and "template" not in result.err
    assert options(llm, "generate")["chat"] is False


def test_json_is_one_object_with_the_whole_answer(run, llm):
    result = run("generate", "ckpt", "--prompt", "hi", "--json", "--sparsity", "0.25", "--stop-token-id", "9")
    answer = json.loads(result.out)
    assert list(answer) == [
        "text",
        "token_ids",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "metrics",
        "settings",
    ]
    assert (answer["text"], answer["token_ids"], answer["completion_tokens"]) == ("all is well", [3, 2, 4], 3)
    assert answer["metrics"]["rows_moved"] == 40
    assert answer["settings"]["load"]["clo"]["sparsity"] == 0.25
    assert answer["settings"]["generate"]["stop_token_ids"] == [9]
    assert answer["settings"]["checkpoint"] == "ckpt"


def test_stream_prints_deltas_that_add_up(run, llm):
    result = run("generate", "ckpt", "--prompt", "hi", "--stream")
    assert (result.code, result.out) == (0, "all is well\n")
    assert "3 new tokens (stop)" in result.err
    assert ("closed",) in llm.calls
