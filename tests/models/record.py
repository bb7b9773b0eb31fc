"""Runs the tiny models of `tiny.py` in transformers. Needs torch and transformers, which the package does not:

    python -m tests.models.record        writes tests/models/recorded/*.npz

The live parity tests call `model_results` and `rope_results` directly."""

import copy
import pathlib

import numpy as np
import torch
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from tests.models import tiny

FOLDER = pathlib.Path(__file__).parent / "recorded"
_FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, modeling_llama),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, modeling_qwen2),
}


def _hf_config(config: dict):
    fields = {key: value for key, value in copy.deepcopy(config).items() if key not in ("model_type", "architectures")}
    return _FAMILIES[config["model_type"]][0](**fields, attn_implementation="eager")


def model_results(name: str) -> dict[str, np.ndarray]:
    """Every rung of one model: inv_freq; layer 0's rotated q, k, v [B, N, heads, D] and attention output; the residual
    stream after each layer; logits; greedy tokens that follow the prompt's first row."""
    config = tiny.MODELS[name]
    _, model_class, module = _FAMILIES[config["model_type"]]
    hf = _hf_config(config)
    hf.pad_token_id = hf.eos_token_id = hf.bos_token_id = None
    model = model_class(hf).eval()
    missing, unexpected = model.load_state_dict(
        {key: torch.from_numpy(value) for key, value in tiny.tensors(config).items()}, strict=False
    )
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    results: dict[str, np.ndarray] = {}
    seen, attend = [], module.eager_attention_forward

    def recording(self, query, key, value, *args, **kwargs):
        out = attend(self, query, key, value, *args, **kwargs)
        seen.append((*(x.transpose(1, 2) for x in (query, key, value)), out[0]))
        return out

    tokens = torch.from_numpy(tiny.prompt()).long()
    layers = []
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out: layers.append(out if torch.is_tensor(out) else out[0]))
        for layer in model.model.layers
    ]
    module.eager_attention_forward = recording
    try:
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
    finally:
        module.eager_attention_forward = attend
        for hook in hooks:
            hook.remove()
    results["inv_freq"] = model.model.rotary_emb.inv_freq.numpy().copy()
    results |= {label: x.numpy() for label, x in zip(("q", "k", "v", "attended"), seen[0], strict=True)}
    results |= {f"layer{index}": x.numpy() for index, x in enumerate(layers)}
    results["logits"] = logits.numpy()
    with torch.no_grad():
        longer = model.generate(
            tokens[:1],
            attention_mask=torch.ones_like(tokens[:1]),
            max_new_tokens=tiny.NEW,
            min_new_tokens=tiny.NEW,
            do_sample=False,
        )
    results["tokens"] = longer[0, tokens.shape[1] :].numpy().astype(np.int32)
    return results


def rope_results(name: str) -> dict[str, np.ndarray]:
    """inv_freq [lengths, D/2], the factor on cos and sin, and cos, sin [positions, D/2] of the first length."""
    config = tiny.rope_model(*tiny.ROPES[name])
    embedding = modeling_llama.LlamaRotaryEmbedding(_hf_config(config))
    frequencies = []
    for length in tiny.ROPE_LENGTHS:
        embedding(torch.zeros(1), torch.tensor([[length - 1]]))
        frequencies.append(embedding.inv_freq.numpy().copy())
    fresh = modeling_llama.LlamaRotaryEmbedding(_hf_config(config))
    fresh.rope_type = "default"  # the positions below are no sequence length
    cos, sin = fresh(torch.zeros(1), torch.tensor([tiny.ROPE_POSITIONS]))
    half = cos.shape[-1] // 2
    return {
        "inv_freq": np.stack(frequencies),
        "factor": np.float64(embedding.attention_scaling),
        "cos": cos[0, :, :half].numpy(),
        "sin": sin[0, :, :half].numpy(),
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in tiny.MODELS:
        np.savez_compressed(FOLDER / f"{name}.npz", **model_results(name))
    np.savez_compressed(
        FOLDER / "ropes.npz",
        **{f"{name}/{key}": value for name in tiny.ROPES for key, value in rope_results(name).items()},
    )
    total = sum(path.stat().st_size for path in FOLDER.glob("*.npz"))
    print(f"{len(tiny.MODELS)} models and {len(tiny.ROPES)} rotary embeddings, {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
