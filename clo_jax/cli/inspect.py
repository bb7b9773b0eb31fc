"""`clo-jax inspect`: what a checkpoint is, without reading its parameters."""

from typing import Any

from rich.table import Table

from clo_jax.cli import _console
from clo_jax.cli import _options as o


def describe(path: str) -> dict[str, Any]:
    """Everything that inspect prints, as plain values; reads no parameter."""
    import jax.numpy as jnp

    from clo_jax.checkpoints import read_info
    from clo_jax.text import Tokenizer

    config, info = read_info(path)
    itemsize = jnp.dtype(info.dtype).itemsize
    tokenizer = Tokenizer.from_folder(info.path) if Tokenizer.available(info.path) else None
    return {
        "path": info.path,
        "architecture": config,
        "dtype": info.dtype,
        "num_tensors": info.manifest.num_tensors,
        "num_parameters": info.manifest.num_bytes // itemsize,
        "parameter_bytes": info.manifest.num_bytes,
        "kv_bytes_per_token": 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize,
        "stop_tokens": [
            {"id": token, "text": None if tokenizer is None else tokenizer.id_to_token(token)}
            for token in info.stop_token_ids
        ],
        "tokenizer": tokenizer is not None,
        "chat_template": tokenizer is not None and tokenizer.has_chat_template,
        "calibration": info.calibration,
        "format_version": info.manifest.format_version,
        "converter": info.manifest.converter,
        "source": {
            "kind": info.manifest.source_kind,
            "name": info.manifest.source_name,
            "sha256": dict(info.manifest.source_files),
        },
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def inspect(
    path: o.Checkpoint,
    json: o.Json = False,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Print architecture, sizes, stop tokens and origin of a checkpoint."""
    found = describe(path)
    if json:
        _console.print_json(found)
        return
    config = found["architecture"]
    rope = [f"base {config.rope.theta:g}", config.rope.rope_type, *(f"{k} {v}" for k, v in config.rope.parameters)]
    biases = [name for name in ("qkv_bias", "output_bias", "mlp_bias") if getattr(config, name)]
    stops = [f"{token['id']}" + (f" {token['text']}" if token["text"] else "") for token in found["stop_tokens"]]
    rows = {
        "checkpoint": str(found["path"]),
        "architecture": config.architecture,
        "layers": str(config.num_layers),
        "heads": f"{config.num_heads} query, {config.num_kv_heads} key/value, {config.head_dim} wide",
        "sizes": f"hidden {config.hidden_size}, MLP {config.intermediate_size}, vocabulary {config.vocab_size}",
        "embeddings": "tied" if config.tie_word_embeddings else "untied",
        "biases": ", ".join(biases) or "none",
        "rotary embedding": ", ".join(rope),
        "longest context": f"{config.max_position_embeddings} tokens",
        "parameters": f"{found['num_parameters']} in {found['num_tensors']} tensors, "
        f"{_console.human_bytes(found['parameter_bytes'])} of {found['dtype']}",
        "KV cache per token": f"{_console.human_bytes(found['kv_bytes_per_token'])} in {found['dtype']}",
        "stop tokens": ", ".join(stops) or "none",
        "tokenizer": _yes(found["tokenizer"]),
        "chat template": _yes(found["chat_template"]),
        "calibration": "present" if found["calibration"] else "absent",
        "format": f"version {found['format_version']}, written by {found['converter']}",
        "source": f"{found['source']['name']} ({found['source']['kind']})",
        **{f"sha256 {name}": digest for name, digest in found["source"]["sha256"].items()},
    }
    table = Table(show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    _console.stdout().print(table)
