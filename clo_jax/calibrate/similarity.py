"""How alike a head's queries, selections and buffers are from step to step: statistics for the planner, and a trace of
hits and moved rows that benches replay.

Answers are decoded greedily with full attention; then one pass over prompt and answer gives every step's exact and
guessed queries, and each head's cache is followed through the steps in plain numpy, by the rules of the policy.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.cache.calibration import Calibration
from clo_jax.cache.calibration_parts import Similarity, Trace
from clo_jax.cache.layout import CacheLayout
from clo_jax.cache.projections import projections
from clo_jax.cache.thresholds import thresholds
from clo_jax.calibrate import collect
from clo_jax.calibrate.collect import LayerSamples
from clo_jax.calibrate.mass import attention, encode, key_mean, scores
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.ops.prefetch import refresh_slots
from clo_jax.policies.clo import HeadScores, measured_scores, neutral_scores
from clo_jax.policies.full import FullPolicy
from clo_jax.prompts import Request
from clo_jax.session import Session

STATISTICS = tuple(field.name for field in dataclasses.fields(Similarity) if field.name != "settings")


class Step(NamedTuple):
    """What the policy asks of one decode step: candidates [begin, end), k rows of them, capacity slots of the buffer,
    and whether every head is refreshed."""

    begin: int
    end: int
    k: int
    capacity: int
    forced: bool


def schedule(layout: CacheLayout, clo: CloConfig, length: int, steps: int) -> list[Step]:
    """The first fill after a prompt of `length` tokens, then each decode step."""
    at = jnp.asarray([length, *range(length, length + steps)], jnp.int32)
    end, before = np.asarray(layout.flushed(at)), np.asarray(layout.flushed(at - 1))
    k = layout.num_selected(at)
    forced = (end != before) & clo.refresh_on_flush
    forced[0] = True
    columns = (np.minimum(layout.sink, end), end, np.asarray(k), np.asarray(layout.capacity(k)))
    return [Step(*(int(x) for x in row), bool(now)) for *row, now in zip(*columns, forced, strict=True)]


def cosine(a: np.ndarray, b: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Eq. 10: cosine of queries a, b [..., G, D], weighted by importance [G] (evenly when that is 0) -> [...]."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    each = np.where(norms > 0, (a * b).sum(-1) / np.where(norms > 0, norms, 1), 0)
    return each.mean(-1) if importance.sum() == 0 else (each * importance).sum(-1) / importance.sum()


@functools.partial(jax.jit, static_argnums=0)
def _score_head(retriever, queries, guesses, keys, positions, prompt_length, weights):
    """Weights of exact attention [M, N], mean over the group, and scores [M, N] of the guesses, by one head's codes.
    As in a decode, a step's normaliser is the one that the step before left behind."""
    p, lse = attention(queries, keys, positions)
    before = jnp.concatenate([lse[:1], lse[:-1]])
    if retriever == "exact":
        logits = jnp.einsum("mgd,nd->mgn", guesses, keys, precision="highest") * keys.shape[-1] ** -0.5
        found = jnp.exp(jnp.minimum(logits - before[..., None], 80.0)).sum(axis=1)
    else:
        mean = key_mean(keys, prompt_length) if retriever == "sign" else jnp.zeros_like(keys[0])
        found = scores(retriever, guesses, encode(keys, mean, weights), weights, before)
    return p.mean(axis=1), found


def _best(score: np.ndarray, step: Step) -> np.ndarray:
    """The k best candidates, ascending; of equal ones those of lower index."""
    candidates = score[step.begin : step.end]
    if not step.k:
        return np.zeros(0, np.int64)
    least = np.partition(candidates, len(candidates) - step.k)[len(candidates) - step.k]
    above = np.flatnonzero(candidates > least)
    equal = np.flatnonzero(candidates == least)[: step.k - len(above)]
    return np.sort(np.concatenate([above, equal])) + step.begin


def follow_head(
    queries: np.ndarray, guesses: np.ndarray, p: np.ndarray, score: np.ndarray, plan: Sequence[Step],
    importance: np.ndarray, threshold: float, num_slots: int, whole: bool,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Follows one head's cache through the steps.

    Args:
      queries, guesses: [M, G, D]; of the last prompt token, then of every step.
      p: [M, N]; exact attention weights. score: [M, N]; what the codes make of the guesses.
      plan: M steps, the first fill first.
      importance: [G]; threshold: tau of the head. num_slots: C. whole: whether a refresh replaces everything.

    Returns:
      every statistic of `Similarity` as float64 [M - 1], NaN where a step has none (rows of a hit, for one); "hits"
      bool [M - 1]; "moved" int64 [M - 1].
    """
    table = (np.full(num_slots, -1, np.int32), np.zeros(num_slots, np.uint16), 0, 0)
    rows = []
    label, exact_before = guesses[0], None
    for m, step in enumerate(plan):
        exact, guessed = _best(p[m], step), _best(score[m], step)
        to_label = float(cosine(guesses[m], label, importance))
        hit = step.k == 0 or (not step.forced and to_label >= threshold)
        moves = []
        if not hit:
            label = guesses[m]
            *table, moves = refresh_slots(*table, guessed, step.capacity, whole=whole)
        if m:
            held = table[0][: table[2]]
            best = p[m][exact].sum()
            rows.append(
                {
                    "adjacent": float(cosine(guesses[m], guesses[m - 1], importance)),
                    "to_label": to_label,
                    "guess": float(cosine(guesses[m], queries[m], importance)),
                    "hit_rate": float(hit),
                    "overlap": np.isin(exact, exact_before).mean() if step.k else np.nan,
                    "new_rows": np.nan if hit else len(moves) / step.k,
                    "guessed_mass": p[m][guessed].sum() / best if step.k else np.nan,
                    "reused_mass": p[m][held].sum() / best if step.k else np.nan,
                    "hits": hit,
                    "moved": len(moves),
                }
            )
        exact_before = exact
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def answers(
    config: ModelConfig, params, prompts: Sequence[Sequence[int]], steps: int
) -> list[list[int]]:  # fmt: skip
    """Greedy continuations of `steps` tokens, with full attention."""
    longest = max(len(prompt) for prompt in prompts)
    if longest + steps > config.max_position_embeddings:
        raise ValueError(
            f"steps: got {steps} after {longest} tokens, wanted at most {config.max_position_embeddings} together"
        )
    policy = FullPolicy(CacheLayout.full(config, 1, longest + steps, str(params["embed"]["embedding"].dtype)))
    tables, found = policy.tables(), []
    for prompt in prompts:
        session = Session(config, params, policy, tables, None, Request([list(prompt)], [steps], [], None), steps)
        for _ in session:
            pass
        found.append(session.tokens[0])
    return found


def measure(
    config: ModelConfig, params, prompts: Sequence[Sequence[int]], *, steps: int = 48, clo: CloConfig | None = None,
    calibration: Calibration | None = None, progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Similarity, Trace]:  # fmt: skip
    """Measures similarity and hits of every head on the answers to prompts.

    Args:
      config, params: the model.
      prompts: token ids, of several lengths where the statistics should cover them.
      steps: decode steps per prompt.
      clo: the policy that is followed (None: the defaults). Every head counts as offloaded.
      calibration: gives head scores and trained projections, where it has them.
      progress: called with (layers done, layers in all, what is being done).

    Returns:
      means per head, over prompts and steps; what happened at each step.
    """
    clo = CloConfig() if clo is None else clo
    L, K, G, D = config.num_layers, config.num_kv_heads, config.group, config.head_dim
    if progress is not None:
        progress(0, L, "decoding answers")
    whole = [
        [*prompt, *answer] for prompt, answer in zip(prompts, answers(config, params, prompts, steps), strict=True)
    ]
    every = tuple((layer, ()) for layer in range(L))
    layout = CacheLayout.clo(
        config, dataclasses.replace(clo, resident_heads=every), 1, max(len(ids) for ids in whole), "float32"
    )
    importance = calibration.importance if calibration is not None else None
    head_scores = neutral_scores(layout) if importance is None else measured_scores(layout, importance)
    hashed = calibration.hash_of(clo.retriever, clo.hash_bits) if calibration is not None else None
    tau = thresholds(head_scores.kv_heads, clo.sim_threshold, clo.importance_power)
    untrained = np.broadcast_to(projections(clo.retriever, D, layout.hash_bits, clo.seed), (K, D, layout.hash_bits))
    plans = [schedule(layout, clo, len(prompt), steps) for prompt in prompts]
    positions = [list(range(len(prompt) - 1, len(prompt) + steps)) for prompt in prompts]
    found = {name: np.zeros((len(prompts), steps, L, K)) for name in (*STATISTICS, "hits", "moved")}
    for layer, samples in enumerate(collect.layers(config, params, whole, positions, clo.guess_from)):
        weights = untrained if hashed is None else hashed.weights[layer]
        group = head_scores.query_heads[layer].reshape(K, G)
        for number, (one, prompt, plan) in enumerate(zip(samples, prompts, plans, strict=True)):
            followed = _follow_layer(one, len(prompt), plan, clo, weights, group, tau[layer], layout.num_slots)
            for name, values in followed.items():
                found[name][number, :, layer] = values
        if progress is not None:
            progress(layer + 1, L, f"layer {layer} followed")
    return _summary(found, plans, prompts, clo, head_scores, hashed is not None and hashed.trained)


def _follow_layer(
    samples: LayerSamples, prompt_length: int, plan: Sequence[Step], clo: CloConfig, weights: np.ndarray,
    importance: np.ndarray, tau: np.ndarray, num_slots: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """[steps, K] of each statistic."""
    K, _, D = samples.keys.shape
    queries, guesses = (part.reshape(part.shape[0], K, -1, D) for part in (samples.queries, samples.guesses))
    # The first fill takes the exact query of the last prompt token: its layer is at hand.
    guesses = guesses.at[0].set(queries[0])
    heads = []
    for h in range(K):
        p, score = _score_head(
            clo.retriever, queries[:, h], guesses[:, h], samples.keys[h], samples.positions,
            jnp.int32(prompt_length), jnp.asarray(weights[h]),
        )  # fmt: skip
        heads.append(
            follow_head(
                np.asarray(queries[:, h]), np.asarray(guesses[:, h]), np.asarray(p, np.float64), np.asarray(score),
                plan, importance[h], float(tau[h]), num_slots, clo.refresh == "whole",
            )
        )  # fmt: skip
    return {name: np.stack([head[name] for head in heads], axis=1) for name in heads[0]}


def _summary(found, plans, prompts, clo: CloConfig, head_scores: HeadScores, trained: bool) -> tuple[Similarity, Trace]:
    def mean(values: np.ndarray) -> np.ndarray:
        """Over prompts and steps that have a value; 0 where none has."""
        there = ~np.isnan(values)
        total = np.where(there, values, 0).sum(axis=(0, 1))
        return (total / np.maximum(there.sum(axis=(0, 1)), 1)).astype(np.float32)

    settings = {
        "clo": dataclasses.asdict(dataclasses.replace(clo, resident_heads=None)),
        "trained_hash": trained,
        "head_scores": head_scores.source,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "steps": len(plans[0]) - 1,
    }
    similarity = Similarity(**{name: mean(found[name]) for name in STATISTICS}, settings=settings)
    return similarity, Trace(
        hits=found["hits"].astype(bool),
        new_rows=found["moved"].astype(np.int32),
        selected=np.array([[step.k for step in plan[1:]] for plan in plans], np.int32),
        lengths=np.array([len(prompt) for prompt in prompts], np.int32),
    )
