"""Checkpoints: Hugging Face folders and GGUF files to Orbax, and from there into memory.

result = convert("SmolLM2-135M-Instruct", "out")
config, params, info = load_checkpoint("out")
"""

from clo_jax.checkpoints.convert import ConvertResult, convert
from clo_jax.checkpoints.load import CheckpointInfo, load_checkpoint, read_info

__all__ = ["CheckpointInfo", "ConvertResult", "convert", "load_checkpoint", "read_info"]
