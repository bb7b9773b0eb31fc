"""The verbs on a tiny checkpoint with random weights: convert, inspect, generate, chat."""

import builtins
import json
import socket

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
PROMPT = "the quick brown fox jumps over the lazy dog, again and again; " * 4


def write_source(folder):
    """A Hugging Face folder: byte-level tokenizer (a token is a byte), chat template, random weights."""
    random = np.random.default_rng(0)
    H, K, D, E, F, V = 4, 2, 64, 64, 96, 259

    def kernel(*shape):
        return (random.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {"model.embed_tokens.weight": kernel(V, E), "lm_head.weight": kernel(V, E) * 8}
    tensors["model.norm.weight"] = np.ones(E, np.float32)
    for i in range(CONFIG["num_hidden_layers"]):
        shapes = {"q": (H * D, E), "k": (K * D, E), "v": (K * D, E), "o": (E, H * D)}
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"] = kernel(*shape)
        for name, shape in {"gate": (F, E), "up": (F, E), "down": (E, F)}.items():
            tensors[f"model.layers.{i}.mlp.{name}_proj.weight"] = kernel(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(E, np.float32)
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|turn|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_source(folder)
    return folder


@pytest.fixture
def checkpoint(source, run):
    folder = source.parent / "converted"
    if not folder.exists():
        result = run("convert", source, folder)
        assert result.code == 0, result.err
    return folder


def generate(run, checkpoint, *flags):
    result = run("generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", "24", "--ignore-eos", "--json", *flags)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_inspect(run, checkpoint):
    result = run("inspect", checkpoint)
    assert result.code == 0
    assert "llama" in result.out and "257" in result.out


def test_clo_at_full_budget_gives_the_tokens_of_full_attention(run, checkpoint):
    full = generate(run, checkpoint, "--attention", "full")
    clo = generate(run, checkpoint, "--sparsity", "1")
    assert full["completion_tokens"] == 24 and full["finish_reason"] == "length"
    assert clo["token_ids"] == full["token_ids"] and clo["text"] == full["text"]
    assert full["prompt_tokens"] == clo["prompt_tokens"] > len(PROMPT)  # the template around it
    assert full["metrics"]["host_kv_bytes"] == 0 and clo["metrics"]["host_kv_bytes"] > 0


def test_offload_changes_no_token(run, checkpoint):
    flags = ("--sparsity", "0.1", "--recent-tokens", "8", "--hash-bits", "64")
    on, off = generate(run, checkpoint, *flags), generate(run, checkpoint, *flags, "--no-kv-offload")
    assert on["token_ids"] == off["token_ids"]
    assert on["metrics"]["rows_moved"] > 0
    assert on["settings"]["load"]["clo"]["sparsity"] == 0.1


def test_stream_equals_one_shot(run, checkpoint):
    flags = ("--prompt", PROMPT, "--max-new-tokens", "24", "--ignore-eos", "--no-chat", "--quiet")
    whole, streamed = run("generate", checkpoint, *flags), run("generate", checkpoint, *flags, "--stream")
    assert whole.code == streamed.code == 0
    assert whole.out == streamed.out != "\n"


def test_sampling_is_repeatable_by_seed(run, checkpoint):
    one = generate(run, checkpoint, "--do-sample", "--temperature", "2", "--seed", "1")["token_ids"]
    assert generate(run, checkpoint, "--do-sample", "--temperature", "2", "--seed", "1")["token_ids"] == one
    assert generate(run, checkpoint, "--do-sample", "--temperature", "2", "--seed", "2")["token_ids"] != one


def test_a_further_stop_token_ends_the_answer(run, checkpoint):
    ids = generate(run, checkpoint, "--attention", "full")["token_ids"]
    stopped = generate(run, checkpoint, "--attention", "full", "--stop-token-id", str(ids[3]))
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"] == ids[: ids.index(ids[3]) + 1]


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(run, checkpoint):
    result = run("generate", checkpoint, "--prompt", "x" * 600, "--no-chat", "--max-new-tokens", "8")
    assert result.code == 2
    assert all(number in result.err for number in ("600", "8", "512"))


def test_no_checkpoint_is_a_failed_run(run, tmp_path):
    result = run("generate", tmp_path / "nothing", "--prompt", "hi")
    assert result.code == 1
    assert result.err.startswith("error: ") and "nothing" in result.err
    assert "Traceback" not in result.err


def snapshot(folder):
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def test_using_a_checkpoint_changes_none_of_its_files(run, checkpoint):
    before = snapshot(checkpoint)
    generate(run, checkpoint)
    run("inspect", checkpoint)
    assert len(before) > 5 and snapshot(checkpoint) == before


def test_no_network(run, source, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"a connection was tried: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse, raising=True)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert run("convert", source, tmp_path / "out").code == 0
    assert generate(run, tmp_path / "out")["completion_tokens"] == 24


def test_chat(run, checkpoint, monkeypatch):
    asked = iter(["hello", "and?", "/quit"])
    monkeypatch.setattr(builtins, "input", lambda: next(asked))
    result = run("chat", checkpoint, "--max-new-tokens", "5")
    assert result.code == 0, result.err
    assert result.out.count("\n") >= 2
