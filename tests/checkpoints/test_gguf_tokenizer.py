"""tokenizer.json, special tokens and chat template out of GGUF metadata."""

import json

import pytest
import tokenizers

from clo_jax import checkpoints
from clo_jax.checkpoints.gguf_tokenizer import tokenizer_json
from clo_jax.errors import CheckpointError
from clo_jax.text import Tokenizer
from tests.checkpoints import builders


def test_tokenizer_equals_the_one_that_was_stored(tmp_path):
    config = builders.config()
    file = builders.write_gguf(tmp_path / "model.gguf", config, builders.tensors(config))
    checkpoints.convert(file, tmp_path / "out")
    found, wanted = Tokenizer.from_folder(tmp_path / "out"), builders.train_tokenizer()
    for text in ["Hello 1234 world", "你好 😀 naïve", "<s>fox</s> jumps", "  x\n\n y\t", ""]:
        assert found.encode(text) == wanted.encode(text).ids
        assert found.decode(found.encode(text), skip_special_tokens=False) == text
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert found.encode_chat([{"role": "user", "content": "fox"}]) == [1, *wanted.encode("fox").ids, 2]


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("gpt-2", "it'S 1234 ok", ["it", "'", "S", "Ġ1234", "Ġok"]),
        ("smollm", "it's 1234 ok", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġok"]),
        ("llama-bpe", "it'S 1234 ok", ["it", "'S", "Ġ", "123", "4", "Ġok"]),
        ("qwen2", "it'S 1234 ok", ["it", "'S", "Ġ", "1", "2", "3", "4", "Ġok"]),
    ],
)
def test_pre_tokenizers(pre, text, pieces):
    built, _ = tokenizer_json(_vocabulary(pre))
    cut = tokenizers.Tokenizer.from_str(built.decode()).pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


def _vocabulary(pre: str | None = "gpt-2", **changes):
    model = json.loads(builders.train_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    "pre, changes, wanted",
    [
        ("gpt-2", {}, []),
        ("llama-bpe", {}, [1]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [1, 2]),
    ],
)
def test_what_is_added_around_a_text(pre, changes, wanted):
    built = tokenizers.Tokenizer.from_str(tokenizer_json(_vocabulary(pre, **changes))[0].decode())
    assert built.encode("").ids == wanted


def test_user_defined_tokens_are_matched_and_shown():
    types = [3] * 3 + [4] + [1] * (len(_vocabulary()["tokenizer.ggml.tokens"]) - 4)
    tokens = list(_vocabulary()["tokenizer.ggml.tokens"])
    swapped = {**_vocabulary(token_type=types)}
    text = tokens[3]
    built = tokenizers.Tokenizer.from_str(tokenizer_json(swapped)[0].decode())
    assert built.encode(f"<s>{text}").ids == [1, 3]
    assert built.decode([1, 3]) == text


@pytest.mark.parametrize(
    "pre, changes, wanted",
    [
        ("gpt-2", {"model": "llama"}, "tokenizer.ggml.model: got 'llama', supported: 'gpt2'; pass --tokenizer"),
        ("tekken", {}, "tokenizer.ggml.pre: got 'tekken', supported: gpt-2, default, smollm, llama-bpe, qwen2; pass"),
        ("gpt-2", {"merges": None}, "tokenizer.ggml.merges: got NoneType, wanted list"),
        ("gpt-2", {"merges": ["a b c"]}, "tokenizer.ggml.merges: got an entry that is no pair"),
        ("gpt-2", {"merges": ["Q Z"]}, "tokenizer.ggml.merges: "),
        ("gpt-2", {"token_type": [1]}, "tokenizer.ggml.token_type: got 1 entries, wanted 320"),
        ("gpt-2", {"tokens": ["a"] * 320}, "some tokens are there twice"),
        ("gpt-2", {"add_bos_token": True, "bos_token_id": 320}, "add_bos_token is set, but bos_token_id is no token"),
    ],
)
def test_tokenizers_that_cannot_be_built(pre, changes, wanted):
    with pytest.raises(CheckpointError) as error:
        tokenizer_json(_vocabulary(pre, **changes))
    assert wanted in str(error.value)


def test_unstated_pre_tokenizer_is_noted():
    for pre in (None, "default"):
        assert tokenizer_json(_vocabulary(pre))[1] == ("tokenizer.ggml.pre is not stated: texts are cut as for GPT-2",)


def test_unknown_tokenizer_needs_a_file_or_none(tmp_path):
    config = builders.config()
    file = builders.write_gguf(tmp_path / "m.gguf", config, builders.tensors(config), tokenizer_model="llama")
    with pytest.raises(CheckpointError, match="--no-tokenizer"):
        checkpoints.convert(file, tmp_path / "refused")
    checkpoints.convert(file, tmp_path / "ids", with_tokenizer=False)
    assert not Tokenizer.available(tmp_path / "ids")
    builders.train_tokenizer().save(str(tmp_path / "own.json"))
    checkpoints.convert(file, tmp_path / "text", tokenizer=tmp_path / "own.json")
    assert Tokenizer.from_folder(tmp_path / "text").encode("fox") == builders.train_tokenizer().encode("fox").ids


def test_unused_tokens_stand_for_no_text(tmp_path):
    config = builders.config(vocab_size=352)
    file = builders.write_gguf(tmp_path / "model.gguf", config, builders.tensors(config))
    checkpoints.convert(file, tmp_path / "out")
    tokenizer = Tokenizer.from_folder(tmp_path / "out")
    assert tokenizer.vocab_size == 320
    assert tokenizer.decode([340]) == ""
