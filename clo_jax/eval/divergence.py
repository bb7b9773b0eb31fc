"""Perplexity of a text and divergence from full attention, token by token: the most sensitive comparison of policies,
on any model and any text.

The first tokens of the text are prefilled, which all policies do alike; the last ones are decoded as they stand in the
text, and at each of them the prediction of the next token is compared with full attention's.
"""

import dataclasses
import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clo_jax.checkpoints import read_info
from clo_jax.config import ModelConfig
from clo_jax.errors import CloError
from clo_jax.eval.budget import shares
from clo_jax.eval.haystack import haystack
from clo_jax.eval.runner import Bar, no_bar
from clo_jax.eval.selection import WHOLE, References
from clo_jax.eval.variants import Variant
from clo_jax.text import Tokenizer

PERCENTILES = (50, 90, 99, 100)


@dataclasses.dataclass(frozen=True)
class Plan:
    """`lengths`: tokens of text that are read, of which the last `tokens` are decoded. `text`: a file; None: generated
    prose, chosen by `seed`. `variants`: full attention first. `recall_tokens`: how many of the decoded tokens, the
    first ones, selection recall is measured along; 0: it is not."""

    checkpoint: str
    variants: tuple[Variant, ...]
    lengths: tuple[int, ...]
    tokens: int
    text: Path | None
    seed: int
    dtype: str
    recall_tokens: int = 32

    @property
    def measured_steps(self) -> int:
        """Decoded tokens that selection recall is measured at; none without a policy to compare."""
        alone = all(variant.attention == "full" for variant in self.variants)
        return 0 if alone else min(self.recall_tokens, self.tokens - 1)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """One variant at one length. `kl`: float64 [n], KL(full || variant) in nats at each decoded token. `agreement`:
    share of them where both have the same likeliest next token. `rows_moved`: for each step; None where the policy does
    not count it, as for the other figures (see `eval.budget`). `recall`, `mass_kept`: see `eval.selection`; None where
    they are not measured."""

    variant: str
    attention: str
    sparsity: float | None
    length: int
    perplexity: float
    kl: np.ndarray
    agreement: float
    hit_rate: float | None
    rows_moved: float | None
    selected: float | None
    attended: float | None
    recall: float | None
    mass_kept: float | None

    @property
    def percentiles(self) -> dict[str, float]:
        """Of `kl`, by name: p50, p90, p99, p100 (the largest)."""
        return {
            f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(self.kl, PERCENTILES), strict=True)
        }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`results`: variants in their order, each at all lengths. `text`: digest of the file, or "generated".
    `described[variant name]`: what its LLM said of itself."""

    plan: Plan
    results: tuple[Divergence, ...]
    text: str
    described: dict[str, dict[str, Any]]


def run(plan: Plan, bar: Bar = no_bar) -> Outcome:
    """Decodes the text by every variant. Logits of full attention are kept in a temporary file meanwhile.

    Raises:
      ValueError: lengths or tokens that make no sense for the model, or a text that is too short.
      CloError: no room for the temporary file.
    """
    config, info = read_info(plan.checkpoint)
    ids, digest = _text(plan, Tokenizer.from_folder(info.path), config)
    steps = plan.tokens - 1  # the last token has no successor to predict
    need = len(plan.lengths) * steps * config.vocab_size * 4
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if need > free:
        raise CloError(
            f"{tempfile.gettempdir()}: {free} bytes free, wanted {need} for logits of full attention: fewer tokens or "
            "lengths, or another TMPDIR"
        )
    results, described = [], {}
    with (
        References(config, plan.measured_steps * sum(plan.lengths), "--recall-tokens") as references,
        tempfile.TemporaryDirectory(prefix="clo-jax-") as folder,
    ):
        kept = {
            length: np.memmap(Path(folder) / str(length), np.float32, "w+", shape=(steps, config.vocab_size))
            for length in plan.lengths
        }
        for variant in plan.variants:
            with bar(f"ppl, {variant.name}", len(plan.lengths) * (steps + plan.measured_steps)) as advance:
                results += _measure(plan, variant, config, ids, kept, references, described, advance)
        kept.clear()  # before the folder goes
    return Outcome(plan, tuple(results), digest, described)


def _text(plan: Plan, tokenizer: Tokenizer, config: ModelConfig) -> tuple[list[int], str]:
    """Token ids, at least as many as the longest length, and what they are."""
    limit = config.max_position_embeddings
    if not plan.lengths:
        raise ValueError("lengths: got none, wanted at least one")
    if plan.tokens < 2:
        raise ValueError(f"tokens: got {plan.tokens}, wanted at least 2")
    if plan.recall_tokens < 0:
        raise ValueError(f"recall_tokens: got {plan.recall_tokens}, wanted at least 0")
    for length in plan.lengths:
        if not plan.tokens < length <= limit:
            raise ValueError(
                f"lengths: got {length}, wanted {plan.tokens + 1} to {limit}: more than the tokens that are decoded, "
                "at most the model's limit"
            )
    wanted = max(plan.lengths)
    if plan.text is None:
        # A little more than asked, because the generator's lengths are good to 1 %.
        return tokenizer.encode(haystack(wanted + wanted // 50 + 64, tokenizer, plan.seed)), "generated"
    content = plan.text.read_text("utf-8")
    ids = tokenizer.encode(content)
    if len(ids) < wanted:
        raise ValueError(f"{plan.text}: got {len(ids)} tokens, wanted at least {wanted}")
    return ids, hashlib.sha256(content.encode()).hexdigest()


def _measure(
    plan: Plan, variant: Variant, config: ModelConfig, ids: list[int], logits_kept: dict[int, np.memmap],
    references: References, described: dict[str, dict[str, Any]], advance: Callable[[int], Any],
) -> list[Divergence]:  # fmt: skip
    from clo_jax.llm import LLM

    found = []
    with LLM.load(
        plan.checkpoint, dtype=plan.dtype, max_context=max(plan.lengths), max_batch=1, **variant.load
    ) as llm:  # fmt: skip
        said = llm.describe()
        described[variant.name] = {key: value for key, value in said.items() if key != "checkpoint"}
        for length in plan.lengths:
            prefix, reference = length - plan.tokens, logits_kept[length]
            targets = np.asarray(ids[prefix + 1 : length])
            losses, kl, same = [], [], []
            predicted = llm.forced_logits(ids[:length], prefix)
            next(predicted)  # by prefill, which is the same for all
            for logits, costs in predicted:
                here = slice(len(kl), len(kl) + len(logits))
                if variant.attention == "full":
                    reference[here] = logits
                own, full = log_softmax(logits), log_softmax(reference[here])
                losses.extend(-own[np.arange(len(own)), targets[here]])
                kl.extend(divergence(full, own))
                same.extend(own.argmax(axis=1) == full.argmax(axis=1))
                advance(len(logits))
                metrics = costs
            recall, mass_kept = _selection(plan, variant, llm, ids, length, references, advance)
            selected, attended = shares(config, variant.load, said, prefix, len(kl) + 1)
            found.append(
                Divergence(
                    variant.name, variant.attention, variant.sparsity, length, math.exp(np.mean(losses)),
                    np.array(kl), float(np.mean(same)), metrics.hit_rate,
                    None if metrics.backend is None else metrics.rows_moved / len(kl), selected, attended,
                    recall, mass_kept,
                )
            )  # fmt: skip
    return found


def _selection(
    plan: Plan, variant: Variant, llm: Any, ids: list[int], length: int, references: References,
    advance: Callable[[int], Any],
) -> tuple[float | None, float | None]:  # fmt: skip
    """Recall and mass kept of a variant along the first decoded tokens; full attention leaves the reference."""
    if not plan.measured_steps:
        return None, None
    prefix = length - plan.tokens
    tokens = ids[: prefix + plan.measured_steps + 1]
    if variant.attention == "full":
        references.take(length, llm, tokens, prefix, advance)
        return WHOLE.recall, WHOLE.mass
    found = references.compare(length, llm, tokens, prefix, variant.sparsity, advance)
    return found.recall, found.mass


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 of logits [n, V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def divergence(full: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(full || other) in nats, [n], of log-probabilities [n, V]; tokens that full attention rules out count
    nothing."""
    with np.errstate(invalid="ignore"):  # 0 times infinity, where the other branch is taken
        return np.where(full > -np.inf, np.exp(full) * (full - other), 0.0).sum(axis=1)
