"""tokenizer.json, tokenizer_config.json and the chat template out of GGUF metadata, for byte-level BPE vocabularies."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from clo_jax.checkpoints.files import json_bytes
from clo_jax.errors import CheckpointError

# Token types of GGUF (llama.h, enum llama_token_type).
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

# How Llama 3 and Qwen2 cut a text before BPE (their tokenizer.json); they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HINT = "pass --tokenizer tokenizer.json (the model's own), or --no-tokenizer to convert without text"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


_PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "default": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "llama-bpe": lambda: _split(_WORDS % "{1,3}"),
    "qwen2": lambda: _split(_WORDS % ""),
}


def _required(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(key)
    if not isinstance(value, kind):
        raise CheckpointError(f"{key}: got {type(value).__name__}, wanted {kind.__name__}")
    return value


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of bos, eos, eot, eom, unknown and padding tokens, those that the file gives."""
    names = ("bos", "eos", "eot", "eom", "unknown", "padding")
    found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    return {name: int(token) for name, token in found.items() if token is not None}


def tokenizer_json(metadata: Mapping[str, Any]) -> tuple[bytes, tuple[str, ...]]:
    """tokenizer.json as bytes, and notes on what was assumed.

    Raises:
      CheckpointError: a vocabulary that is no byte-level BPE, a pre-tokenizer that is not known here (both by name), or
        inconsistent lists.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(f"tokenizer.ggml.model: got {model!r}, supported: 'gpt2'; {_HINT}")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(f"tokenizer.ggml.pre: got {pre!r}, supported: {', '.join(_PRE_TOKENIZERS)}; {_HINT}")
    notes = ("tokenizer.ggml.pre is not stated: texts are cut as for GPT-2",) if pre == "default" else ()
    tokens = _required(metadata, "tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type: got {len(types)} entries, wanted {len(tokens)}")
    # Unused tokens only pad the embedding; they stand for no text.
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    if len(vocabulary) != sum(kind != _UNUSED for kind in types):
        raise CheckpointError("tokenizer.ggml.tokens: some tokens are there twice")
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "tokenizer.ggml.merges", list)]
    if any(len(merge) != 2 for merge in merges):
        raise CheckpointError("tokenizer.ggml.merges: got an entry that is no pair of tokens")
    try:
        built = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    # The library raises plain Exception, as for a merge whose result is not in the vocabulary.
    except Exception as error:
        raise CheckpointError(f"tokenizer.ggml.merges: {error}") from None
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    built.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    built.decoder = decoders.ByteLevel()
    built.post_processor = _around(metadata, tokens, default_bos=pre == "llama-bpe")
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            added = tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            (built.add_special_tokens if kind == _CONTROL else built.add_tokens)([added])
    return built.to_str().encode("utf-8"), notes


def _around(metadata: Mapping[str, Any], tokens: list[str], default_bos: bool) -> processors.PostProcessor:
    """What is added around a text: BOS and EOS as the file says; Llama 3 files leave it out and mean BOS."""
    ids = special_ids(metadata)
    ends = []
    for name, default in (("bos", default_bos), ("eos", False)):
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            if not 0 <= ids.get(name, -1) < len(tokens):
                raise CheckpointError(f"tokenizer.ggml.add_{name}_token is set, but {name}_token_id is no token")
            ends.append((name, tokens[ids[name]], ids[name]))
    plain = processors.ByteLevel(trim_offsets=False)
    if not ends:
        return plain
    first = [token for name, token, _ in ends if name == "bos"]
    last = [token for name, token, _ in ends if name == "eos"]
    template = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
        special_tokens=[(token, token_id) for _, token, token_id in ends],
    )
    return processors.Sequence([plain, template])


def texts(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer_config.json (special tokens by name) and, where the file has one, chat_template.jinja."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token_id = special_ids(metadata).get(name, -1)
        if 0 <= token_id < len(tokens):
            config[f"{key}_token"] = tokens[token_id]
    found = {"tokenizer_config.json": json_bytes(config)}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        found["chat_template.jinja"] = template.encode("utf-8")
    return found
