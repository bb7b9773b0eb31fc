"""Runs a suite of tasks: makes the samples, asks each variant, keeps the answers. What is there already is not asked
again."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from clo_jax.cache import calibration
from clo_jax.checkpoints import CheckpointInfo, read_info
from clo_jax.config import ModelConfig
from clo_jax.errors import CloError
from clo_jax.eval import metrics, samples
from clo_jax.eval.answers import Answer, AnswerFile, Key, digest
from clo_jax.eval.budget import shares
from clo_jax.eval.measuring import Measuring
from clo_jax.eval.samples import PromptFormat, Sample, Task
from clo_jax.eval.selection import Kept
from clo_jax.eval.sources import Sources
from clo_jax.eval.variants import Variant
from clo_jax.text import Tokenizer

MOST_CUT = 0.05  # share of prompts that may be left out because they do not fit
_MOST_EMPTY = 0.5  # share of answers that may be empty
_ENOUGH = 8  # answers after which that share is looked at while a run goes on

Bar = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]


@contextlib.contextmanager
def no_bar(what: str, total: int) -> Iterator[Callable[[int], Any]]:
    yield lambda n: None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked. `chat`: with the chat template; None: when there is one. `max_batch`: prompts at once."""

    suite: str
    checkpoint: str
    tasks: tuple[Task, ...]
    variants: tuple[Variant, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    chat: bool | None
    dtype: str
    max_batch: int
    sources: Sources
    folder: Path  # of samples and answers
    recall: int = 1  # samples of each task and length that selection recall is measured along


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`samples[length, task]` without those that do not fit, which `left_out` counts; `answers` of the plan, by key;
    `kept`: what policies keep of what full attention looks at, by key of the samples that this is measured along (see
    `eval.selection`); `keys[variant name]`: digest of its settings; `described[variant name]`: what its LLM said of
    itself; `skipped`: tasks that are left out, with what they need; `file`: of the answers."""

    plan: Plan
    chat: bool
    samples: dict[tuple[int, str], list[Sample]]
    left_out: dict[tuple[int, str], int]
    answers: dict[Key, Answer]
    kept: dict[Key, Kept]
    keys: dict[str, str]
    described: dict[str, Any]
    skipped: dict[str, str]
    file: Path


def run(plan: Plan, bar: Bar = no_bar) -> Outcome:
    """Asks what is not answered yet.

    Args:
      bar: `bar(what, total)` is a context manager that gives advance(n), for progress.

    Raises:
      ValueError: lengths, samples or a chat template that make no sense for the checkpoint.
      CloError: more than 5 % of the prompts do not fit their length, or most answers of a variant are empty.
    """
    config, info = read_info(plan.checkpoint)
    prompts = _prompts(plan, config, info)
    missing = {task.name: task.missing(plan.sources) for task in plan.tasks}
    skipped = {name: what for name, what in missing.items() if what is not None}
    tasks = [task for task in plan.tasks if task.name not in skipped]
    if not tasks:
        needed = ", ".join(f"{name} ({what})" for name, what in skipped.items())
        raise ValueError(f"tasks: got only what is left out, wanted a task that lacks nothing: {needed}")
    fitting, left_out = _samples(plan, tasks, prompts, bar)
    setup = {
        "suite": plan.suite, "weights": dict(info.manifest.source_files), "dtype": plan.dtype, "seed": plan.seed,
        "prompts": prompts.digest(), "sources": plan.sources.describe(), "generators": samples.GENERATORS,
    }  # fmt: skip
    file = AnswerFile(plan.folder, setup)
    keys = {variant.name: _settings(variant, info.path) for variant in plan.variants}
    with Measuring(config, plan.recall, plan.variants, keys, prompts, fitting, file) as measuring:
        for variant in plan.variants:
            asking = _Asking(plan, variant, keys[variant.name], config, prompts, tasks, fitting, file)
            with contextlib.ExitStack() as stack:
                llm = stack.enter_context(_load(plan, variant)) if asking.num_open or measuring.open(variant) else None
                if asking.num_open:
                    with bar(f"{plan.suite}, {variant.name}", asking.num_open) as advance:
                        asking.run(llm, advance)
                asking.require_answers()
                if todo := measuring.open(variant):
                    with bar(f"{plan.suite}, {variant.name}, selection", len(todo)) as advance:
                        measuring.run(llm, variant, advance)
    wanted = {
        key: file.answers[key]
        for variant in plan.variants
        for (length, _), made in fitting.items()
        for key in (Key(variant.name, keys[variant.name], length, sample.task, sample.index) for sample in made)
    }
    kept = {key: file.kept[key] for key in measuring.keys() if key in file.kept}
    described = {name: file.described.get((name, settings), {}) for name, settings in keys.items()}
    return Outcome(plan, prompts.chat, fitting, left_out, wanted, kept, keys, described, skipped, file.path)


def _load(plan: Plan, variant: Variant) -> Any:
    from clo_jax.llm import LLM

    return LLM.load(
        plan.checkpoint, dtype=plan.dtype, max_context=max(plan.lengths), max_batch=plan.max_batch, **variant.load
    )


def _prompts(plan: Plan, config: ModelConfig, info: CheckpointInfo) -> PromptFormat:
    """Checks the plan against the checkpoint."""
    limit = config.max_position_embeddings
    for length in plan.lengths:
        if not 1 <= length <= limit:
            raise ValueError(
                f"lengths: got {length}, wanted 1 to {limit}, the model's limit: every prompt would be cut"
            )
    for name, values in (("lengths", plan.lengths), ("tasks", plan.tasks)):
        if not values:
            raise ValueError(f"{name}: got none, wanted at least one")
    for name, value, least in (("samples", plan.samples, 1), ("batch", plan.max_batch, 1), ("recall", plan.recall, 0)):
        if value < least:
            raise ValueError(f"{name}: got {value}, wanted at least {least}")
    tokenizer = Tokenizer.from_folder(info.path)
    if plan.chat and not tokenizer.has_chat_template:
        raise ValueError(f"chat: got {info.path} without a chat template, wanted one with it")
    return PromptFormat(tokenizer, tokenizer.has_chat_template if plan.chat is None else plan.chat)


def _samples(
    plan: Plan, tasks: Sequence[Task], prompts: PromptFormat, bar: Bar
) -> tuple[dict[tuple[int, str], list[Sample]], dict[tuple[int, str], int]]:
    """Those that fit, and how many do not, by length and task."""
    fitting, left_out = {}, {}
    with bar(f"{plan.suite}, samples", len(plan.lengths) * len(tasks) * plan.samples) as advance:
        for length in plan.lengths:
            for task in tasks:
                made = task.samples(
                    plan.samples, length, prompts, plan.sources, plan.seed, plan.folder / "samples", advance
                )
                fitting[length, task.name] = [sample for sample in made if sample is not None]
                left_out[length, task.name] = sum(sample is None for sample in made)
    cut = sum(left_out.values())
    total = cut + sum(len(made) for made in fitting.values())
    if cut > MOST_CUT * total:
        where = ", ".join(f"{task} at {length} ({n})" for (length, task), n in left_out.items() if n)
        raise CloError(
            f"{cut} of {total} prompts are longer than asked even at their shortest and would have to be cut, more "
            f"than {MOST_CUT:.0%}: {where}; ask for longer lengths or without these tasks"
        )
    # A task without any sample at some length has no score there, and no mean over tasks could be taken.
    none = [f"{task} at {length}" for (length, task), made in fitting.items() if not made]
    if none:
        raise CloError(f"no prompt fits for {', '.join(none)}; ask for longer lengths or without these tasks")
    return fitting, left_out


def _settings(variant: Variant, checkpoint: Path) -> str:
    """Digest of what a variant's answers depend on: its arguments and its calibration."""
    given = variant.load.get("calibration", "auto")
    found = None
    if given is not None and variant.attention != "full":
        path = (checkpoint / calibration.FOLDER if given == "auto" else Path(given)) / calibration.FILE
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
    return digest({"load": {name: repr(value) for name, value in variant.load.items()}, "calibration": found})


@dataclasses.dataclass(frozen=True)
class _Asking:
    """One variant's part of a plan."""

    plan: Plan
    variant: Variant
    settings: str
    config: ModelConfig
    prompts: PromptFormat
    tasks: Sequence[Task]
    fitting: dict[tuple[int, str], list[Sample]]
    file: AnswerFile

    def key(self, length: int, sample: Sample) -> Key:
        return Key(self.variant.name, self.settings, length, sample.task, sample.index)

    def open(self, length: int, task: str) -> list[Sample]:
        return [sample for sample in self.fitting[length, task] if self.key(length, sample) not in self.file.answers]

    @property
    def num_open(self) -> int:
        return sum(len(self.open(length, task)) for length, task in self.fitting)

    def run(self, llm: Any, advance: Callable[[int], Any]) -> None:
        """Answers what is open."""
        plan = self.plan
        said = llm.describe() | {"device": jax.devices()[0].device_kind}
        self.file.describe(self.variant.name, self.settings, said)
        for length in plan.lengths:
            for task in self.tasks:
                todo = self.open(length, task.name)
                for first in range(0, len(todo), plan.max_batch):
                    batch = todo[first : first + plan.max_batch]
                    self.file.add(self.ask(llm, length, task, batch))
                    advance(len(batch))
                self.require_answers(length, _ENOUGH)

    def ask(self, llm: Any, length: int, task: Task, batch: Sequence[Sample]) -> list[Answer]:
        ids = [self.prompts.encode(sample.text, sample.prefix, sample.chat) for sample in batch]
        described, answers = llm.describe(), []
        for sample, generation in zip(batch, llm.generate(ids, max_new_tokens=task.answer_tokens), strict=True):
            found = generation.metrics
            selected, attended = shares(
                self.config, self.variant.load, described, generation.prompt_tokens, generation.completion_tokens
            )
            moved = None if found.backend is None else found.rows_moved / len(batch)
            answers.append(
                Answer(
                    self.key(length, sample), generation.text, generation.completion_tokens, generation.finish_reason,
                    found.hit_rate, moved, selected, attended,
                )
            )  # fmt: skip
        return answers

    def require_answers(self, length: int | None = None, enough: int = 1) -> None:
        """Raises CloError when most of at least `enough` answers (of one length, or of each) are empty."""
        for n in self.plan.lengths if length is None else (length,):
            given = [
                self.file.answers[key].text
                for task in self.tasks
                for key in (self.key(n, sample) for sample in self.fitting[n, task.name])
                if key in self.file.answers
            ]
            empty = sum(not metrics.clean(text) for text in given)
            if len(given) >= enough and empty > _MOST_EMPTY * len(given):
                raise CloError(
                    f"{empty} of {len(given)} answers of {self.variant.name} at {n} tokens are empty: chat template "
                    f"and stop tokens of the checkpoint may not be the model's (answers: {self.file.path})"
                )
