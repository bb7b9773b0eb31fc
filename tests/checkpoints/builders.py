"""Tiny models in the formats that conversions read, written here from their published layouts and not by our tables."""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

_TEXTS = [
    "The quick brown fox jumps over the lazy dog; 123 4567 times.",
    "你好，世界。日本語のテキスト 한국어 텍스트 😀🤖👩‍👩‍👧 naïve café",
    "def f(x):\n    return {'a': x ** 2}\n",
]


def config(family: str = "llama", tied: bool = False, **changes) -> dict:
    """config.json of a tiny model: 3 layers, 4 query and 2 key/value heads of 16."""
    return {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[family]],
        "model_type": family,
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        **changes,
    }


def tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 values by Hugging Face name, [out, in]; exact in float16 and bfloat16 alike."""
    rng = np.random.default_rng(seed)

    def values(*shape: int, around: float = 0.0) -> np.ndarray:
        return (around + rng.integers(-32, 33, shape) / 256).astype(np.float32)

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows = {"q": config["num_attention_heads"] * dim}
    rows["k"] = rows["v"] = config["num_key_value_heads"] * dim
    found = {"model.embed_tokens.weight": values(config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for part in "qkv":
            found[f"{layer}.self_attn.{part}_proj.weight"] = values(rows[part], hidden)
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                found[f"{layer}.self_attn.{part}_proj.bias"] = values(rows[part])
        found[f"{layer}.self_attn.o_proj.weight"] = values(hidden, rows["q"])
        if config.get("attention_bias"):
            found[f"{layer}.self_attn.o_proj.bias"] = values(hidden)
        found[f"{layer}.mlp.gate_proj.weight"] = values(inner, hidden)
        found[f"{layer}.mlp.up_proj.weight"] = values(inner, hidden)
        found[f"{layer}.mlp.down_proj.weight"] = values(hidden, inner)
        found[f"{layer}.input_layernorm.weight"] = values(hidden, around=1)
        found[f"{layer}.post_attention_layernorm.weight"] = values(hidden, around=1)
    found["model.norm.weight"] = values(hidden, around=1)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = values(config["vocab_size"], hidden)
    return found


def train_tokenizer(vocab_size: int = 320) -> tokenizers.Tokenizer:
    """A byte-level BPE with the control tokens <unk>, <s>, </s> as its first three."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(_TEXTS, trainer)
    return built


def write_folder(
    folder: Path,
    config: dict,
    values: dict[str, np.ndarray],
    dtype: str = "F32",
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """A Hugging Face folder: model.safetensors, or shards under an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.6}))
    if tokenizer:
        train_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
        )
    cast = {name: np.ascontiguousarray(value.astype(DTYPES[dtype])) for name, value in values.items()}
    if shards == 1:
        save_file(cast, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{1 + i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(cast)}
    for shard in set(weight_map.values()):
        save_file({name: value for name, value in cast.items() if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K of a Llama: row i and row i + D/2 of a head become neighbours."""
    dim = rows.shape[0] // heads
    order = [head * dim + i + half for head in range(heads) for i in range(dim // 2) for half in (0, dim // 2)]
    return rows[order]


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        index, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def write_gguf(
    file: Path,
    config: dict,
    values: dict[str, np.ndarray],
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    tokenizer_model: str = "gpt2",
    metadata: dict | None = None,
    divisors: np.ndarray | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it; only matrices are quantized. `metadata`: more uint32 keys."""
    family = config["model_type"]
    writer = gguf.GGUFWriter(file, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    vocabulary = json.loads(train_tokenizer().to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    padding = [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + padding)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3) + [5] * len(padding))
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, value in values.items():
        stored = gguf_name(name)
        part = stored.split(".")[-2]
        if family == "llama" and part in heads:
            value = permute(value, heads[part])
        value = np.ascontiguousarray(value)
        if value.ndim == 2 and quantization != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, gguf.quantize(value, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(stored, value)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
