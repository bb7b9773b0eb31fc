"""The control from outside: Hugging Face transformers, greedy, SDPA attention. Beside a checkpoint, tokens/s in fp32
with the cache in memory (`clo-jax bench decode --transformers`); at a named shape with random weights, its decode step
with the cache in GPU memory and with its own offloading, which copies the rows of every layer to the GPU and back at
each step.

    python -m clo_jax.bench.transformers_decode OUT.json --context 131072 --compare HEADLINE.json
"""

import argparse
import gc
import inspect
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from clo_jax import memory
from clo_jax.bench import headline, report, ways
from clo_jax.bench.decode import Plan
from clo_jax.bench.subject import Subject, find
from clo_jax.config import DTYPES
from clo_jax.errors import MemoryPlanError

WARM_UP = 2  # steps: kernels are loaded, and pinned memory is taken, in the first ones


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
    torch, transformers = libraries()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    ).eval()  # fmt: skip
    step, found = greedy(model), []
    with torch.no_grad():
        for _ in range(repeats):
            cache = transformers.DynamicCache(config=model.config)
            token = step(torch.tensor([prompt]), cache)
            start = time.perf_counter()
            for _ in range(new_tokens - 1):
                token = step(token, cache)
            found.append((new_tokens - 1) / (time.perf_counter() - start))
    return found


def libraries() -> tuple[Any, Any]:
    """torch and transformers.

    Raises:
      RuntimeError: they are not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise RuntimeError(f"{error.name}: not installed: pip install torch 'clo-jax[parity]'") from None
    return torch, transformers


def greedy(model: Any) -> Callable[[Any, Any], Any]:
    """A function of tokens [B, N] and the cache that takes their rows; it returns the most likely next ones [B, 1]."""
    # Its name in 5.17; 5.24 calls it `cache` and warns of the old one.
    takes_cache = "cache" in inspect.signature(model.forward).parameters
    name = "cache" if takes_cache else "past_key_values"

    def step(tokens, cache):
        logits = model(tokens, use_cache=True, logits_to_keep=1, **{name: cache}).logits
        return logits[:, -1:].argmax(-1)

    return step


def random_model(subject: Subject, device: str) -> Any:
    """The subject's architecture with transformers' own random weights, made on the device."""
    torch, transformers = libraries()
    model = subject.model
    config = transformers.AutoConfig.for_model(
        model.architecture, vocab_size=model.vocab_size, hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size, num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads, num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps, max_position_embeddings=model.max_position_embeddings,
        rope_parameters={"rope_type": model.rope.rope_type, "rope_theta": model.rope.theta, **model.rope.options},
        tie_word_embeddings=model.tie_word_embeddings,
    )  # fmt: skip
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, subject.dtype), attn_implementation="sdpa"
        ).eval()


def steps_ms(model: Any, context: int, steps: int, offloading: bool) -> tuple[list[float], int | None]:
    """Times of the decode steps after the warm-up, from a cache of random rows and without a prefill.

    Args:
      context: tokens in the cache after the last step.

    Returns:
      Milliseconds of each step, and the most bytes that torch had on the GPU in all of them (None: on a CPU).
    """
    torch, transformers = libraries()
    config, like = model.config, {"dtype": model.dtype, "device": model.device}
    on_gpu = model.device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    step, found = greedy(model), []
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=config, offloading=offloading)
        shape = (1, config.num_key_value_heads, context - steps, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape, **like), torch.randn(shape, **like), layer)
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        synchronize()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            start = time.perf_counter()
            token = step(token, cache)
            synchronize()
            found.append((time.perf_counter() - start) * 1e3)
    return found[WARM_UP:], torch.cuda.max_memory_allocated() if on_gpu else None


def run(
    subject: Subject, context: int, steps: int, control: float | None,
    keep: Callable[[list[report.Row], dict[str, str]], Any] = lambda rows, skipped: None,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[list[report.Row], dict[str, str]]:  # fmt: skip
    """The steps of both caches, on the GPU if torch finds one.

    Args:
      control: ms of the step of `clo`. keep: called with what there is after each measurement.
      progress: called with the name of what comes next.

    Returns:
      The measurements, and why those that are missing are.

    Raises:
      MemoryPlanError: nothing fits.
      RuntimeError: torch or transformers are not installed.
    """
    torch, _ = libraries()
    on_gpu = torch.cuda.is_available()
    itemsize, arch = getattr(torch, subject.dtype).itemsize, subject.model
    kv_bytes = 2 * arch.num_layers * arch.num_kv_heads * context * arch.head_dim * itemsize
    progress("random weights")
    try:
        if not on_gpu:
            _require_host({"parameters": subject.weight_bytes})
        model = random_model(subject, "cuda" if on_gpu else "cpu")
    except (MemoryPlanError, RuntimeError) as error:
        raise MemoryPlanError(f"nothing fits. {why_it_does_not_fit(error)}") from None
    found: list[report.Row] = []
    skipped: dict[str, str] = {}
    for cache, offloading in (f"cache in {'GPU' if on_gpu else 'host'} memory", False), ("offloaded cache", True):
        name = ways.title(f"transformers, {cache}", context, 1)
        if offloading and not on_gpu:
            skipped[name] = "torch finds no CUDA device, and transformers offloads from nothing else"
            continue
        progress(name)
        try:
            if offloading or not on_gpu:
                _require_host({"KV rows": kv_bytes})
            times, peak = steps_ms(model, context, steps, offloading)
        except (MemoryPlanError, RuntimeError) as error:
            skipped[name] = why_it_does_not_fit(error)
        else:
            more = {
                "context": context, "batch": 1, "repeats": len(times), "min": min(times), "max": max(times),
                "kv_bytes": kv_bytes, "peak_device_bytes": peak,
            }  # fmt: skip
            against = f"step, {headline.CLO}, {context} tokens, batch 1"
            found.append(report.Row(name, statistics.median(times), "ms", against, control, None, more))
            keep(found, skipped)
        gc.collect()  # torch gives back what nothing holds: the next one needs as much
        torch.cuda.empty_cache()
    if not found:
        raise MemoryPlanError(f"nothing fits. {next(iter(skipped.values()))}")
    return found, skipped


def _require_host(parts: dict[str, int]) -> None:
    """A system that overcommits kills a process that takes more, and no one learns why."""
    advice = "Take a smaller --shape, --context or fewer --layers"
    memory.require(memory.Place("host memory", parts, memory.available_host_bytes(), advice))


def why_it_does_not_fit(error: Exception) -> str:
    """What torch or a memory plan says that does not fit the memory; raises any other error."""
    first, *_ = str(error).splitlines() or [""]
    if not isinstance(error, MemoryPlanError) and not any(m in first for m in ("out of memory", "allocate memory")):
        raise error
    return first


def control_ms(path: pathlib.Path, subject: Subject, context: int) -> float:
    """The step of `clo` in a results file, ms.

    Raises:
      ValueError: it is no results file, or has no such step of this model.
      OSError: it cannot be read.
    """
    name = ways.title(headline.CLO, context, 1)
    try:
        content = json.loads(path.read_text())
        report.validate(content)
    except ValueError as error:
        raise ValueError(f"--compare: {path}: {error}, wanted a results file of the bench") from None
    row = next((row for row in content["rows"] if row["name"] == name and "step_ms" in row), None)
    if row is None:
        raise ValueError(f"--compare: {path} has no row {name!r} with a step_ms, wanted one")
    if (row["model"], row["dtype"]) != (subject.name, subject.dtype):
        raise ValueError(
            f"--compare: got a step of {row['model']} in {row['dtype']}, wanted {subject.name} in {subject.dtype}"
        )
    return row["step_ms"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode steps of Hugging Face transformers with random weights.")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--layers", type=int, help="its first ones only")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=8, help=f"the first {WARM_UP} are not counted")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--compare", type=pathlib.Path, help="results of headline 128k: times longer than clo's step")
    args = parser.parse_args(argv)
    try:
        subject = find(None, args.shape, args.layers, args.dtype)
        if args.steps <= WARM_UP:
            raise ValueError(f"--steps: got {args.steps}, wanted more than {WARM_UP}, which are not counted")
        if not args.steps < args.context <= subject.model.max_position_embeddings:
            wanted = f"more than the {args.steps} steps, up to {subject.model.max_position_embeddings}, the model's"
            raise ValueError(f"--context: got {args.context}, wanted {wanted}")
        control = None if args.compare is None else control_ms(args.compare, subject, args.context)
        torch, transformers = libraries()
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))
    asked = {
        "context": args.context, "batch": 1, "steps": args.steps, **subject.describe(), "attention": "sdpa",
        "torch": str(torch.__version__), "transformers": transformers.__version__,
        "compare": None if args.compare is None else str(args.compare),
    }  # fmt: skip

    def keep(found: list[report.Row], skipped: dict[str, str]) -> dict[str, Any]:
        return report.write(args.out, "transformers", asked | {"skipped": dict(skipped)}, found)

    found = run(subject, args.context, args.steps, control, keep, lambda what: print(what, file=sys.stderr, flush=True))
    print(report.markdown(keep(*found)))


if __name__ == "__main__":
    main()
