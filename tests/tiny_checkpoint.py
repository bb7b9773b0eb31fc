"""A tiny random model as a Hugging Face folder, and converted: what the tests of LLM and the command line load."""

import json
import pathlib

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from clo_jax.checkpoints import convert
from clo_jax.checkpoints.keys import entries, flatten
from clo_jax.config import ModelConfig
from clo_jax.models import abstract_params
from tests import tiny

WORDS = "the cat sat on a mat and looked at rain while number seven slept near old lamp posts".split()
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def hf_config(config: ModelConfig) -> dict:
    """config.json of a model of ours."""
    return {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }


def tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE of at most 256 + 3 ids, cut to the tiny vocabulary: bytes that the model has, and specials."""
    specials = ["<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:253]
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(specials)
    return made


def write_folder(folder: pathlib.Path, config: ModelConfig = tiny.LLAMA, seed: int = 0) -> pathlib.Path:
    """The Hugging Face folder."""
    folder.mkdir(parents=True)
    leaves = flatten(tiny.params(config, seed))
    tensors = {}
    for entry in entries(abstract_params(config, np.dtype(np.float32))):
        array = np.asarray(leaves[entry.path])
        tensors[entry.name] = np.ascontiguousarray(array.T if entry.transposed else array)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 255], "temperature": 0.7, "top_k": 20, "top_p": 0.9})
    )
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    return folder


def write_checkpoint(folder: pathlib.Path, config: ModelConfig = tiny.LLAMA, seed: int = 0) -> pathlib.Path:
    """The converted checkpoint."""
    return convert(write_folder(folder / "hf", config, seed), folder / "checkpoint").path
