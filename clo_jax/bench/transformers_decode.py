"""The control from outside: Hugging Face transformers with its cache in memory, fp32, greedy, SDPA attention."""

import pathlib
import statistics
import time

from clo_jax.bench import report
from clo_jax.bench.decode import Plan


def rows(plan: Plan, gguf: pathlib.Path, full: dict[int, float], repeats: int = 3) -> list[report.Row]:
    """Tokens/s at each context, single sequences.

    Args:
      gguf: the model's file. full: tokens/s of full attention by context, the control.

    Raises:
      RuntimeError: torch or transformers are not installed.
    """
    made = []
    for context in plan.contexts:
        (prompt,) = plan.subject.prompts(1, context - plan.steps)
        measured = rates(gguf, prompt, plan.steps, repeats)
        more = {"context": context, "batch": 1, "repeats": repeats, "min": min(measured), "max": max(measured)}
        made.append(
            report.Row(
                f"transformers, {context} tokens", statistics.median(measured), "tokens/s", "full", full.get(context),
                None, more,
            )
        )  # fmt: skip
    return made


def rates(gguf: pathlib.Path, prompt: list[int], new_tokens: int, repeats: int) -> list[float]:
    """Tokens a second of each repeat, the first token apart."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise RuntimeError("--transformers: not installed: pip install torch 'clo-jax[parity]'") from None
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for _ in range(repeats):
            out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            start = time.perf_counter()
            for _ in range(new_tokens - 1):
                out = model(token, past_key_values=cache, use_cache=True)
                token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            found.append((new_tokens - 1) / (time.perf_counter() - start))
    return found
