"""What a caller of `LLM` gives, checked and turned into requests: prompts, limits, stop tokens, sampling settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from clo_jax.sampling import Sampling
from clo_jax.text import Tokenizer

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
DEFAULT_NEW_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """How to answer; see `LLM.generate` for each field."""

    max_new_tokens: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | Sequence[int] = 0
    stop_token_ids: int | Sequence[int] = ()
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True)
class Request:
    """What a session runs, already checked. One entry per row."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: Sequence[int]
    stop: Sequence[int]
    sampling: Sampling | None


def token_ids(
    prompts: Prompts, chat: bool, tokenizer: Tokenizer | None, vocab_size: int, source: Any
) -> list[list[int]]:
    """Token ids of each prompt; `source` is the checkpoint, named when it has no tokenizer.

    Raises:
      ValueError: no prompt, an empty one, an id outside the vocabulary, text without a tokenizer, chat with ids.
    """
    items: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        items = [items]
    if not items:
        raise ValueError("prompts: got none, wanted at least one")
    encoded = []
    for number, item in enumerate(items):
        if isinstance(item, str):
            if tokenizer is None:
                raise ValueError(f"prompts: got text, but {source} has no tokenizer.json; give token ids")
            ids = tokenizer.encode_chat([{"role": "user", "content": item}]) if chat else tokenizer.encode(item)
        elif chat:
            raise ValueError("chat: got True with token ids, wanted text")
        else:
            ids = [int(token) for token in item]
        if not ids:
            raise ValueError(f"prompts[{number}]: got an empty prompt, wanted at least one token")
        bad = [token for token in ids if not 0 <= token < vocab_size]
        if bad:
            raise ValueError(f"prompts[{number}]: got token {bad[0]}, wanted 0 to {vocab_size - 1}")
        encoded.append(ids)
    return encoded


def requests(
    ids: Sequence[Sequence[int]], options: Options, *, max_context: int, max_batch: int, model_stop: Sequence[int],
    generation_config: Mapping[str, Any],
) -> list[Request]:  # fmt: skip
    """Groups of at most `max_batch` prompts, ready to run.

    Args:
      model_stop: the checkpoint's stop tokens; `generation_config`: its sampling defaults.

    Raises:
      ValueError: a prompt and its answer that do not fit together, or an option out of range.
    """
    limits = [_limit(number, len(prompt), options.max_new_tokens, max_context) for number, prompt in enumerate(ids)]
    extra = options.stop_token_ids
    stop = [extra] if isinstance(extra, int) else list(extra)
    stop += [] if options.ignore_eos else model_stop
    seeds = [options.seed] * len(ids) if isinstance(options.seed, int) else list(options.seed)
    if len(seeds) != len(ids):
        raise ValueError(f"seed: got {len(seeds)} seeds, wanted one or one per prompt ({len(ids)})")
    values = _sampling_values(options, generation_config)
    groups = (slice(i, i + max_batch) for i in range(0, len(ids), max_batch))
    return [Request(ids[g], limits[g], stop, None if values is None else _sampling(values, seeds[g])) for g in groups]


def _limit(number: int, length: int, max_new_tokens: int | None, max_context: int) -> int:
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, wanted at least 1")
    room = max_context - length
    wanted = min(DEFAULT_NEW_TOKENS, max(room, 1)) if max_new_tokens is None else max_new_tokens
    if wanted > room:
        raise ValueError(
            f"prompts[{number}]: got {length} tokens and max_new_tokens {wanted}, wanted at most "
            f"max_context = {max_context} together"
        )
    return wanted


def _sampling_values(options: Options, defaults: Mapping[str, Any]) -> tuple[float, int, float] | None:
    given = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    if not options.do_sample:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: got {value} with do_sample False, wanted do_sample=True")
        return None
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    for name in given:
        if given[name] is None:
            given[name] = off[name] if defaults.get(name) is None else defaults[name]
    temperature, top_k, top_p = given.values()
    if not (np.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature: got {temperature}, wanted a positive number (greedy: do_sample=False)")
    if top_k < 0:
        raise ValueError(f"top_k: got {top_k}, wanted 0 (off) or a positive integer")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}, wanted a number in (0, 1]")
    return float(temperature), int(top_k), float(top_p)


def _sampling(values: tuple[float, int, float], seeds: Sequence[int]) -> Sampling:
    temperature, top_k, top_p = values
    B = len(seeds)
    return Sampling(
        jnp.full((B,), temperature, jnp.float32), jnp.full((B,), top_k, jnp.int32), jnp.full((B,), top_p, jnp.float32),
        jnp.asarray(np.array([seed % 2**32 for seed in seeds], np.uint32)),
    )  # fmt: skip
