"""The recall model as a checkpoint: by way of a Hugging Face folder, so that other programs read it, too."""

import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from clo_jax.checkpoints import ConvertResult, convert
from clo_jax.checkpoints.keys import entries, flatten
from clo_jax.config import ModelConfig
from clo_jax.eval.recall import chains
from clo_jax.models import abstract_params

TRAINING = "training.json"  # in the checkpoint's folder: how long which device trained it


def tokenizer() -> tokenizers.Tokenizer:
    """Whole words, separated by spaces: the names of `chains`."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocab={name: i for i, name in enumerate(chains.NAMES)}, unk_token=chains.NAMES[0])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


def write_hf(config: ModelConfig, params: dict[Any, Any], folder: pathlib.Path) -> None:
    """Writes config.json, model.safetensors (bfloat16) and tokenizer.json."""
    leaves, tensors = flatten(params), {}
    for entry in entries(abstract_params(config, np.dtype(np.float32))):
        array = np.asarray(jnp.asarray(leaves[entry.path], jnp.bfloat16))
        tensors[entry.name] = np.ascontiguousarray(array.T if entry.transposed else array)
    save_file(tensors, folder / "model.safetensors")
    described = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps, "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta, "tie_word_embeddings": config.tie_word_embeddings, "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described, indent=1))
    tokenizer().save(str(folder / "tokenizer.json"))


def write(config: ModelConfig, params: dict[Any, Any], out: pathlib.Path) -> ConvertResult:
    """Writes the checkpoint `out`."""
    with tempfile.TemporaryDirectory() as folder:
        write_hf(config, jax.device_get(params), pathlib.Path(folder))
        return convert(folder, out)
