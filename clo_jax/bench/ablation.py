"""The paper's ablation on a real model, part by part: hit rate, rows moved, right answers to hidden-number questions.

    full         full attention: the control of the answers
    uniform      one threshold for all heads; a KV head misses as soon as one query head of its group does
    +T           thresholds by head importance (Eq. 7-9)
    +T +G        the query heads of a group decide together, weighted by importance (Eq. 10): the product
    +T +G +P     heads that are hard to reuse stay resident as planned (Eq. 11-13), with this machine's measured costs
    +T +G +P, nothing hidden   the same for a link that carries nothing while a layer computes: N_p = 0
    uniform +G   the product without a calibration of importance

What is the product's in every row, because it cannot be switched off or is not one of the paper's three parts: guesses
one layer ahead, layer 0 resident, sink and tail always attended, delta refresh into retained slots, a refresh of all
heads after a flush, the calibration's codes. A prompt at a time.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clo_jax.bench import report
from clo_jax.cache import calibration as calibrations
from clo_jax.cache.calibration import Calibration
from clo_jax.cache.layout import CacheLayout
from clo_jax.cache.planner import Plan, make_plan, measured_machine, with_resident
from clo_jax.cache.thresholds import ALWAYS_MISS
from clo_jax.checkpoints import load_checkpoint
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.eval.haystack import haystack, number_fact
from clo_jax.planning import backend_of, measured_heads
from clo_jax.policies.base import LayerState, Policy, Position, Shared, Tables
from clo_jax.policies.clo import CloPolicy, measured_scores, neutral_scores
from clo_jax.policies.full import FullPolicy
from clo_jax.prompts import Request
from clo_jax.session import Session
from clo_jax.text import Tokenizer
from clo_jax.transfer.engine import Engine

PLACES = ("observatory", "lighthouse", "library", "quarry", "greenhouse", "foundry", "brewery", "chapel")
NEW_TOKENS = 24
_ALWAYS_HIT = -2.0  # below every cosine


@dataclasses.dataclass(frozen=True)
class EveryHeadPolicy(CloPolicy):
    """CLO without Eq. 10: a KV head hits only when each query head of its group reaches the threshold. For a batch of
    one: the verdict reaches the op through its thresholds, which all sequences share."""

    def _prefetch(
        self, layer: jax.Array, tables: Tables, query: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[LayerState, Shared, jax.Array]:
        least = least_cosine(query[0], state["label"][0], tables["thresholds"].shape[0])
        decided = jnp.where(least >= tables["thresholds"], jnp.float32(_ALWAYS_HIT), jnp.float32(ALWAYS_MISS))
        return super()._prefetch(layer, {**tables, "thresholds": decided}, query, at, state, shared)


def least_cosine(query: jax.Array, label: jax.Array, num_kv_heads: int) -> jax.Array:
    """Smallest cosine in each group: query, label [H, D] -> float32 [K]; 0 for a vector of length 0, as in Eq. 10."""
    query, label = query.astype(jnp.float32), label.astype(jnp.float32)
    norms = jnp.linalg.norm(query, axis=-1) * jnp.linalg.norm(label, axis=-1)
    cosine = jnp.where(norms > 0, jnp.sum(query * label, axis=-1) / jnp.where(norms > 0, norms, 1.0), 0.0)
    return cosine.reshape(num_kv_heads, -1).min(axis=1)


class Question(NamedTuple):
    """Token ids of a prompt, and the number that answers it."""

    ids: list[int]
    number: str


class Found(NamedTuple):
    """One way of answering all questions. Sums over them; `hits` is weighted by decode steps."""

    right: int
    answers: list[list[int]]
    steps: int
    hits: float
    rows_moved: int
    rows_selected: int


def questions(tokenizer: Tokenizer, number: int, shortest: int, longest: int, seed: int) -> list[Question]:
    """Hidden-number questions of evenly spread lengths."""
    made = []
    for i in range(number):
        length = shortest + (longest - shortest) * i // max(number - 1, 1)
        place = PLACES[i % len(PLACES)]
        sentence, secret = number_fact(place, seed + i)
        depth = random.Random(f"clo-jax ablation {seed + i}").uniform(0.1, 0.9)
        task = f"\n\nWhat is the secret number of the {place}? Answer with the number only."
        text = haystack(length, tokenizer, seed + i, [(sentence, depth)]) + task
        chat = tokenizer.has_chat_template
        ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
        made.append(Question(list(ids), secret))
    return made


def ask(
    model: ModelConfig, params: Any, policy: Policy, engine: Engine | None, asked: Sequence[Question],
    tokenizer: Tokenizer, stop: Sequence[int],
) -> Found:  # fmt: skip
    """Answers every question greedily."""
    tables, answers = policy.tables(), []
    right, steps, hits, moved, selected = 0, 0, 0.0, 0, 0
    for question in asked:
        request = Request([question.ids], [NEW_TOKENS], list(stop), None)
        session = Session(model, params, policy, tables, engine, request, NEW_TOKENS)
        for _ in session:
            pass
        metrics, tokens = session.metrics(), session.tokens[0]
        answers.append(list(tokens))
        right += question.number in tokenizer.decode(session.without_stop(tokens))
        steps += len(tokens) - 1
        hits += (metrics.hit_rate or 0.0) * (len(tokens) - 1)
        moved, selected = moved + metrics.rows_moved, selected + metrics.rows_selected
    return Found(right, answers, steps, hits, moved, selected)


def plans(model: ModelConfig, clo: CloConfig, layout: CacheLayout, found: Calibration) -> dict[str, Plan]:
    """The paper's plan for this machine, and for a link that covers no head."""
    scores = measured_scores(layout, found.importance)
    heads = measured_heads(scores.kv_heads, scores.source, found.similarity, clo)
    machine = measured_machine(found.costs, backend_of("auto", found.costs), model, layout)
    slow = dataclasses.replace(machine, link_bytes_per_s=1.0, source="a link that hides nothing")
    return {
        "+T +G +P": make_plan("paper", model, clo, layout, heads, machine),
        "+T +G +P, nothing hidden": make_plan("paper", model, clo, layout, heads, slow),
    }


def measure(
    model: ModelConfig, params: Any, clo: CloConfig, found: Calibration, asked: Sequence[Question],
    tokenizer: Tokenizer, stop: Sequence[int], backend: str,
    keep: Callable[[dict[str, Found], dict[str, Plan]], None] = lambda results, planned: None,
    note: Callable[[str], None] = lambda what: None,
) -> tuple[dict[str, Found], dict[str, Plan]]:  # fmt: skip
    """Every row of the table, and the plans of those that have one. `keep` gets what there is after each row, `note`
    what it says."""
    context = max(len(question.ids) for question in asked) + NEW_TOKENS
    dtype = str(params["embed"]["embedding"].dtype)
    layout = CacheLayout.clo(model, clo, 1, context, dtype)
    hashed = found.hash_of(clo.retriever, clo.hash_bits)
    measured, neutral = measured_scores(layout, found.importance), neutral_scores(layout)
    planned = plans(model, clo, layout, found)
    results: dict[str, Found] = {}

    def run(name: str, policy: Policy, engine: Engine | None) -> None:
        results[name] = ask(model, params, policy, engine, asked, tokenizer, stop)
        one = results[name]
        note(f"{name}: {one.right} of {len(asked)} right, {one.steps} steps")
        keep(results, planned)

    def engine_of(of: CacheLayout) -> Engine:
        return Engine(
            kv_heads=[len(of.offloaded(layer)) for layer in range(model.num_layers)], batch=1,
            max_tokens=of.max_tokens, num_slots=of.num_slots, head_dim=of.head_dim, dtype=jnp.dtype(dtype),
            kv_dtype=of.kv_dtype, backend=backend,
        )  # fmt: skip

    run("full", FullPolicy(CacheLayout.full(model, 1, context, dtype)), None)
    with engine_of(layout) as engine:
        for name, kind, scores in (
            ("uniform", EveryHeadPolicy, neutral), ("+T", EveryHeadPolicy, measured), ("+T +G", CloPolicy, measured)
        ):  # fmt: skip
            run(name, kind(layout, clo, engine.handle, scores, hashed), engine)
        for name, plan in planned.items():
            if with_resident(model, clo, layout, plan.resident) == layout:
                results[name] = results["+T +G"]  # nothing but layer 0 is resident, which it is anyway
        run("uniform +G", CloPolicy(layout, clo, engine.handle, neutral, hashed), engine)
    for name, plan in planned.items():
        if name not in results:
            of = with_resident(model, clo, layout, plan.resident)
            with engine_of(of) as engine:
                run(name, CloPolicy(of, clo, engine.handle, measured, hashed, "paper"), engine)
    return results, planned


def rows(results: dict[str, Found], planned: dict[str, Plan], number: int) -> list[report.Row]:
    """The table."""
    full, base, made = results["full"], results.get("uniform"), []
    made.append(report.Row("answers right, full", full.right, "answers", "questions", number))
    for name, one in results.items():
        if name == "full":
            continue
        plan = planned.get(name)
        more: dict[str, Any] = {"decode_steps": one.steps}
        if plan is not None:
            more |= {
                "resident_heads": plan.num_resident, "heads_that_prefetch_covers": plan.prefetchable,
                "planned_for": plan.machine.source,
            }  # fmt: skip
        same = sum(a == b for a, b in zip(one.answers, full.answers, strict=True))
        hits, base_hits = one.hits / one.steps, base.hits / base.steps
        made += [
            report.Row(f"hit rate, {name}", hits, "share", "uniform", base_hits or None, None, more),
            report.Row(
                f"rows moved / rows selected, {name}", one.rows_moved / max(one.rows_selected, 1), "share", None, None,
                None, {"rows_selected": one.rows_selected},
            ),
            report.Row(
                f"rows moved a token, {name}", one.rows_moved / one.steps, "rows", "uniform",
                base.rows_moved / base.steps or None,
            ),
            report.Row(
                f"answers right, {name}", one.right, "answers", "full", full.right or None, None,
                {"questions": number, "same_answer_as_full": same},
            ),
        ]  # fmt: skip
    return made


def run(
    checkpoint: str, prompts: int, shortest: int, longest: int, dtype: str, backend: str, seed: int,
    keep: Callable[[dict[str, Any], list[report.Row]], None] = lambda arguments, rows: None,
    note: Callable[[str], None] = lambda what: None,
) -> tuple[dict[str, Any], list[report.Row]]:  # fmt: skip
    """The table of a checkpoint with its calibration.

    Args:
      prompts: questions, of documents of `shortest` to `longest` tokens. dtype: of the model, or "auto".
      keep: gets what a results file holds, after each row of the table. note: called with what was just measured.

    Returns:
      What describes the run, and the figures.

    Raises:
      ValueError: a calibration that lacks a part, or sizes that make no sense.
    """
    if prompts < 1:
        raise ValueError(f"--prompts: got {prompts}, wanted a positive integer")
    model, params, info = load_checkpoint(checkpoint, dtype=dtype)
    if not 1 <= shortest <= longest <= model.max_position_embeddings:
        raise ValueError(
            f"--shortest, --longest: got {shortest} and {longest}, wanted ascending lengths up to the model's "
            f"{model.max_position_embeddings}"
        )
    found = calibrations.read(info.path / calibrations.FOLDER).require_fit(model)
    for part in ("importance", "similarity", "costs"):
        if getattr(found, part) is None:
            raise ValueError(f"checkpoint: its calibration has no {part}, wanted one that has: clo-jax calibrate CKPT")
    choice = found.choice
    codes = {"retriever": choice.retriever, "hash_bits": choice.hash_bits} if choice else {}
    clo = CloConfig(sim_threshold=0.8, guess_from="input", **codes)  # as in the paper
    tokenizer = Tokenizer.from_folder(info.path)
    asked = questions(tokenizer, prompts, shortest, longest, seed)
    arguments = {
        "checkpoint": info.path.name, "prompts": prompts, "shortest": shortest, "longest": longest, "dtype": dtype,
        "backend": backend, "seed": seed, "clo": dataclasses.asdict(clo), "importance": found.importance.source,
    }  # fmt: skip
    results, planned = measure(
        model, params, clo, found, asked, tokenizer, info.stop_token_ids, backend,
        lambda results, planned: keep(arguments, rows(results, planned, len(asked))), note,
    )  # fmt: skip
    return arguments, rows(results, planned, len(asked))
