"""The parts of a calibration, one function each: what is measured, its figures, and what its provenance says of how."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.cache import calibration as calibrations
from clo_jax.cache.calibration import Calibration
from clo_jax.cache.calibration_parts import Importance
from clo_jax.calibrate import costs as costs_lib
from clo_jax.calibrate import hash_training, hashing, similarity, text
from clo_jax.calibrate.duo_scores import read_duo_scores
from clo_jax.calibrate.importance import Gates, GateSettings, optimise_gates, stretched
from clo_jax.calibrate.passkeys import Example, passkey_examples
from clo_jax.calibrate.quick import quick_estimate
from clo_jax.checkpoints import CheckpointInfo
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.planning import free_device_bytes
from clo_jax.text import Tokenizer

STATE_FILE = "importance.partial.npz"  # a gate optimisation that has not ended
WORK_FOLDER = "hash.partial"  # layers of hash training that are done
_ROOM = 0.95  # of the model's longest context, for prompts
_SIMILARITY_SEED = 1_000_003
_QUICK = {True: 8, False: 16}  # prompts of the quick estimate, small or not


class Bar:
    """Makes no progress bars; `bar(what, total)` is a context that gives advance(n)."""

    def __call__(self, what: str, total: int | None) -> AbstractContextManager[Any]:
        return _Silent()


class _Silent:
    def __enter__(self):
        return lambda n: None

    def __exit__(self, *exc) -> None:
        pass


class Made(NamedTuple):
    """What a part gives: parts to be kept, figures to be shown, further provenance."""

    kept: tuple[Any, ...]
    figures: dict[str, Any]
    origin: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded checkpoint and how it is calibrated. `small`: short prompts, few steps."""

    config: ModelConfig
    params: Any
    info: CheckpointInfo
    clo: CloConfig
    small: bool
    seed: int
    resume: bool

    @property
    def folder(self) -> pathlib.Path:
        return self.info.path / calibrations.FOLDER

    def half(self) -> Any:
        """Parameters for training gates: 16 bits on a GPU, as in the original; as they are on a CPU."""
        if jax.default_backend() == "cpu":
            return self.params
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), self.params)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.info.path)

    def lengths(self, *wanted: int) -> tuple[int, ...]:
        """Those lengths that the model's context has room for, or the longest that it has."""
        limit = int(_ROOM * self.config.max_position_embeddings)
        return tuple(length for length in wanted if length <= limit) or (limit,)


def gate_settings(model: Model, changes: Mapping[str, Any]) -> GateSettings:
    """The settings for a model: no prompt is longer than its context."""
    base = GateSettings()
    return dataclasses.replace(base, **{"lengths": model.lengths(*base.lengths), "seed": model.seed, **changes})


def importance(model: Model, how: str, changes: Mapping[str, Any], bar: Bar) -> Made:
    """Head importance: "gates", "quick", or the path of a DuoAttention file."""
    if how not in ("gates", "quick"):
        part = read_duo_scores(how, model.config)
        return Made((part,), _spread(part), {"file": pathlib.Path(how).name})
    settings = gate_settings(model, changes)
    if how == "quick":
        settings = dataclasses.replace(settings, examples=_QUICK[model.small])
    examples = passkey_examples(
        settings.examples, settings.lengths, model.tokenizer(), settings.seed, settings.needles, settings.words
    )
    prompts = calibrations.digest([example.tokens.tolist() for example in examples])
    origin = {"prompts_sha256": prompts, "arguments": dataclasses.asdict(settings)}
    if how == "quick":
        with bar("importance: quick estimate", len(examples)) as advance:
            part = quick_estimate(
                model.config, model.half(), examples, settings.window, lambda done, total: advance(1)
            )  # fmt: skip
        return Made((part,), _spread(part), origin)
    found = _gates(model, examples, settings, bar)
    scores, stretch = stretched(found.scores)
    part = Importance(scores, "gates")
    last = found.distances[-max(1, len(found.distances) // 10) :]
    return Made((part,), {**_spread(part), "stretched_by": stretch, "last_distance": float(last.mean())}, origin)


def _gates(model: Model, examples: list[Example], settings: GateSettings, bar: Bar) -> Gates:
    state = model.folder / STATE_FILE
    if not model.resume:
        state.unlink(missing_ok=True)
    with bar("importance: gates", settings.steps) as advance:
        shown = 0

        def step(done):
            nonlocal shown
            advance(done.step - shown)  # the first step of a continued run brings the earlier ones along
            shown = done.step

        return optimise_gates(model.config, model.half(), examples, settings, state_file=state, progress=step)


def hash_settings(model: Model) -> list[hash_training.HashSettings]:
    """Both kinds of code at equal bytes, so that one can be chosen; more lengths, and more steps on more queries and
    keys, when there is time."""
    kinds = [("sign", 256), ("hata", 256)]
    more = {"steps": 100}
    if not model.small:
        kinds = [("sign", 64), ("sign", 128), ("sign", 256), ("hata", 256)]
        more = {"steps": 1000, "queries": 64, "keys": 2048}
    return [hash_training.HashSettings(kind, bits, seed=model.seed, **more) for kind, bits in kinds]


def layers_at_once(model: Model, lengths: Sequence[int], settings: Sequence[hash_training.HashSettings]) -> int:
    """Layers whose projections are trained side by side: what half of a GPU's free memory holds, in even groups. On a
    CPU one by one."""
    free = free_device_bytes()
    if free is None:
        return 1
    L = model.config.num_layers
    most = max(1, free // 2 // hash_training.bytes_of_a_layer(model.config, lengths, settings))
    return -(-L // -(-L // most))


def hashes(model: Model, bar: Bar) -> Made:
    """Trained projections, and which retriever is better."""
    sizes = {"count": 3, "held_out": 2} if model.small else {"count": 12, "held_out": 6}
    lengths = model.lengths(1500) if model.small else model.lengths(3000, 6000)
    prompts = text.prompts(model.tokenizer(), num_tokens=lengths, seed=model.seed, **sizes)
    settings = hash_settings(model)
    work = model.folder / WORK_FOLDER
    with bar("hash: layers", model.config.num_layers) as advance:
        trained = hashing.train(
            model.config, model.params, prompts, settings, work=work, progress=_layers(advance),
            queries_per_prompt=64 if model.small else 128,
            layers_at_once=layers_at_once(model, [len(one) for part in prompts for one in part], settings),
        )  # fmt: skip
    choice = hashing.choose(trained)
    figures = {one.settings.name: one.figures()["held_out_mass"] for one in trained}
    untrained = {one.settings.name: one.figures()["untrained_mass"] for one in trained}
    origin = {
        "prompts_sha256": prompts.sha256(),
        "arguments": [dataclasses.asdict(one) for one in settings],
        "per_layer": {one.settings.name: one.figures()["mass_per_layer"] for one in trained},
    }
    kept = (*(one.part(model.config) for one in trained), choice)
    return Made(kept, {**figures, "untrained": untrained, "chosen": f"{choice.retriever}-{choice.hash_bits}"}, origin)


def similarities(model: Model, found: Calibration | None, bar: Bar) -> Made:
    """Similarity of steps and a trace, with the head scores and projections that the calibration has by now."""
    clo = model.clo
    if found is not None and found.choice is not None and clo == CloConfig():
        clo = CloConfig(retriever=found.choice.retriever, hash_bits=found.choice.hash_bits)
    lengths = model.lengths(500, 1500, 3000) if model.small else model.lengths(500, 1000, 2000, 4000, 7000)
    count = len(lengths) if model.small else 8
    # Far from the seeds that projections are trained with: nothing was trained on these prompts.
    prompts = text.prompts(
        model.tokenizer(), count=count, held_out=1, num_tokens=lengths, seed=model.seed + _SIMILARITY_SEED
    )  # fmt: skip
    steps = 32 if model.small else 64
    with bar("similarity: layers", model.config.num_layers) as advance:
        part, trace = similarity.measure(
            model.config, model.params, prompts.train, steps=steps, clo=clo, calibration=found,
            progress=_layers(advance),
        )  # fmt: skip
    names = ("adjacent", "to_label", "hit_rate", "new_rows", "reused_mass")
    figures = {name: float(np.mean(getattr(part, name))) for name in names}
    return Made((part, trace), figures, {"prompts_sha256": prompts.sha256(), "arguments": {"steps": steps}})


def costs(
    model: Model, batches: tuple[int, ...], contexts: tuple[int, ...] | None, backend: str, bar: Bar
) -> Made:  # fmt: skip
    """Layer time and bandwidths."""
    if contexts is None:
        wanted = (1024, 4096) if model.small else (8192, 32768, 131072)
        contexts = tuple(sorted({min(context, model.config.max_position_embeddings) for context in wanted}))
    with bar("costs", costs_lib.num_measurements(batches, contexts)) as advance:
        part = costs_lib.measure_costs(
            model.config, model.params, model.clo, batches=batches, contexts=contexts, backend=backend,
            progress=lambda what: advance(1),
        )  # fmt: skip
    figures = {
        "link_gb_per_s": {name: rate / 1e9 for name, rate in part.link_bytes_per_s.items()},
        "layer_us": {f"batch {b}, {s} tokens": t * 1e6 for b, s, t in part.layer_times},
    }
    return Made((part,), figures, {"arguments": {"clo": dataclasses.asdict(model.clo), "backend": backend}})


def _layers(advance: Any) -> Any:
    """A progress callback (layers done, layers in all, what) that advances a bar."""
    shown = 0

    def tell(done: int, total: int, what: str) -> None:
        nonlocal shown
        advance(done - shown)
        shown = done

    return tell


def _spread(part: Importance) -> dict[str, float]:
    scores = part.scores
    return {
        "mean": float(scores.mean()),
        "share_above_0.9": float((scores > 0.9).mean()),
        "share_below_0.1": float((scores < 0.1).mean()),
    }
