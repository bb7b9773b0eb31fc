"""What a run's answers say: scores of tasks, means, losses against full attention, what was moved and read."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from clo_jax.eval import intervals, metrics
from clo_jax.eval.answers import Answer, Key
from clo_jax.eval.runner import Outcome
from clo_jax.eval.selection import WHOLE, Kept
from clo_jax.eval.variants import FULL


@dataclasses.dataclass(frozen=True)
class Score:
    """In points, 0 to 100, with its interval. `samples`: how many it is the mean of; `empty`: answers without text."""

    value: float
    low: float
    high: float
    samples: int
    empty: int = 0


class Costs(NamedTuple):
    """Of some answers; None where the policy does not count it. `hit_rate`: mean over all decode steps, of which those
    of one length look up about as much. `rows_moved`: for each decode step of one sequence. `selected`, `attended`:
    means over answers."""

    hit_rate: float | None
    rows_moved: float | None
    selected: float | None
    attended: float | None


def costs(answers: Sequence[Answer]) -> Costs:
    """What a policy moved and read for its answers."""
    steps = sum(max(answer.new_tokens - 1, 0) for answer in answers)
    moved = [answer.rows_moved for answer in answers]
    return Costs(
        hit_rate=_weighted((a.hit_rate, a.new_tokens - 1) for a in answers),
        rows_moved=None if None in moved or not steps else sum(moved) / steps,
        selected=_weighted((a.selected, 1) for a in answers),
        attended=_weighted((a.attended, 1) for a in answers),
    )


@dataclasses.dataclass(frozen=True)
class Summary:
    """One variant at one length. `mean`: over tasks of their scores. `loss`: of full attention's mean less this one, on
    the same samples; positive where this is worse; None for full attention itself. `recall`, `mass_kept`: over heads,
    layers and steps of the samples that they are measured along (`eval.selection`); None where they are not. The other
    figures are `Costs`."""

    variant: str
    attention: str
    sparsity: float | None
    length: int
    tasks: Mapping[str, Score]
    mean: Score
    loss: Score | None
    hit_rate: float | None
    rows_moved: float | None
    selected: float | None
    attended: float | None
    recall: float | None
    mass_kept: float | None


def summarize(outcome: Outcome) -> list[Summary]:
    """Every variant at every length, full attention first."""
    metric_of = {task.name: task.metric for task in outcome.plan.tasks}
    found = []
    for variant in outcome.plan.variants:
        for length in outcome.plan.lengths:
            answers, scores, control = {}, {}, {}
            for (n, task), made in outcome.samples.items():
                if n != length:
                    continue

                def of(name: str, made: Any = made, n: int = n) -> list[Answer]:
                    return [outcome.answers[Key(name, outcome.keys[name], n, s.task, s.index)] for s in made]

                answers[task] = of(variant.name)
                for scored, given in ((scores, answers[task]), (control, of(FULL.name))):
                    pairs = zip(given, made, strict=True)
                    scored[task] = np.array([metric_of[task](a.text, s.outputs) for a, s in pairs])
            kept = [k for key, k in outcome.kept.items() if key.variant == variant.name and key.length == length]
            if variant.attention == "full" and outcome.plan.recall:
                kept = [WHOLE]
            found.append(_summary(variant, length, answers, scores, control, kept))
    return found


def _summary(
    variant: Any, length: int, answers: Mapping[str, list[Answer]], scores: Mapping[str, np.ndarray],
    control: Mapping[str, np.ndarray], kept: list[Kept],
) -> Summary:  # fmt: skip
    every = [answer for given in answers.values() for answer in given]
    empty = {task: sum(not metrics.clean(answer.text) for answer in given) for task, given in answers.items()}
    return Summary(
        variant.name, variant.attention, variant.sparsity, length,
        tasks={
            task: _score(values.mean(), intervals.wilson(values), len(values), empty[task])
            for task, values in scores.items()
        },
        mean=_mean(scores, sum(empty.values())),
        loss=None if variant.attention == "full" else _mean({task: control[task] - scores[task] for task in scores}),
        **costs(every)._asdict(),
        recall=_weighted((k.recall, k.steps) for k in kept),
        mass_kept=_weighted((k.mass, k.steps) for k in kept),
    )  # fmt: skip


def _score(value: float, interval: tuple[float, float], samples: int, empty: int = 0) -> Score:
    return Score(100 * float(value), 100 * interval[0], 100 * interval[1], samples, empty)


def _mean(values: Mapping[str, np.ndarray], empty: int = 0) -> Score:
    mean = np.mean([x.mean() for x in values.values()])
    return _score(mean, intervals.bootstrap(values), sum(len(x) for x in values.values()), empty)


def _weighted(pairs: Any) -> float | None:
    """Mean of the values that are there, by weight; None when there is none."""
    known = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
    return sum(v * w for v, w in known) / sum(w for _, w in known) if known else None
