"""A whole calibration: which parts, in which order, with which settings, and what is kept of where they came from."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from clo_jax.cache import calibration as calibrations
from clo_jax.cache.calibration import Calibration
from clo_jax.cache.calibration_parts import Costs, Importance
from clo_jax.calibrate import costs as costs_lib
from clo_jax.calibrate.duo_scores import read_duo_scores
from clo_jax.calibrate.importance import Gates, GateSettings, optimise_gates
from clo_jax.calibrate.passkeys import Example, passkey_examples
from clo_jax.calibrate.quick import quick_estimate
from clo_jax.checkpoints import CheckpointInfo, load_checkpoint
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.text import Tokenizer
from clo_jax.versions import versions

STATE_FILE = "importance.partial.npz"  # a gate optimisation that has not ended
_ROOM = 0.95  # of the model's longest context, for prompts

Bar = Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[int], None]]]


@contextlib.contextmanager
def no_bar(what: str, total: int | None):
    yield lambda n: None


@dataclasses.dataclass(frozen=True)
class Parts:
    """What to calibrate. `importance`: "gates", "quick", or the path of a DuoAttention file; None: leave it."""

    importance: str | None = None
    costs: bool = False

    def names(self) -> list[str]:
        return [name for name in ("importance", "costs") if getattr(self, name)]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a calibration left: the parts now there, seconds by part, figures by part."""

    calibration: Calibration
    seconds: Mapping[str, float]
    figures: Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Model:
    """A loaded checkpoint, and what every part's provenance begins with."""

    config: ModelConfig
    params: Any
    info: CheckpointInfo
    clo: CloConfig
    small: bool
    seed: int

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

    def provenance(self, **more: Any) -> dict[str, Any]:
        return {
            "checkpoint_sha256": calibrations.digest(dict(self.info.manifest.source_files)),
            "versions": versions(),
            "device": jax.devices()[0].device_kind,
            "seed": self.seed,
            "small": self.small,
            **more,
        }


def calibrate(
    checkpoint: str | pathlib.Path, parts: Parts, *, small: bool, seed: int = 0, resume: bool = False,
    gates: Mapping[str, Any] | None = None, clo: CloConfig | None = None, batches: tuple[int, ...] = (1,),
    contexts: tuple[int, ...] | None = None, backend: str = "auto", bar: Bar = no_bar,
) -> Outcome:  # fmt: skip
    """Calibrates parts of a model and writes each to CKPT/calibration as soon as it is there.

    Args:
      checkpoint: folder that `clo-jax convert` made.
      parts: what to do; other parts of an earlier calibration stay.
      small: short prompts and few steps, for two CPU cores and a small model.
      seed: of prompts and their order.
      resume: continue a gate optimisation that was interrupted; without it, one that is there is thrown away.
      gates: changes of `GateSettings`.
      clo: settings that costs are measured with. batches, contexts: pairs whose layer time is measured.
      backend: of the timed layers.
      bar: makes a progress bar: bar(what, total) is a context that gives advance(n).

    Raises:
      ValueError: no parts, or settings that make no sense.
      CheckpointError: no readable checkpoint; a calibration there that is damaged or of another model; a state to be
        continued that is of other settings.
    """
    if not parts.names():
        raise ValueError("parts: got none, wanted at least one")
    dtype = "float32" if jax.default_backend() == "cpu" else "auto"  # a CPU is faster in float32
    with bar("loading", None):
        config, params, info = load_checkpoint(checkpoint, dtype=dtype)
    model = _Model(config, params, info, clo or CloConfig(), small, seed)
    existing = calibrations.read_if_there(model.folder)  # a damaged one is named now, not after hours
    if existing is not None:
        existing.require_fit(config)
    seconds: dict[str, float] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name in parts.names():
        start = time.perf_counter()
        if name == "importance":
            part, figures[name], made = _importance(model, parts.importance, resume, gates or {}, bar)
        else:
            part, figures[name], made = _costs(model, batches, contexts, backend, bar)
        seconds[name] = time.perf_counter() - start
        provenance = model.provenance(**made, seconds=seconds[name], figures=figures[name])
        found = calibrations.update(model.folder, part, provenance=provenance, model=config)
        if name == "importance":
            (model.folder / STATE_FILE).unlink(missing_ok=True)
    return Outcome(found, seconds, figures)


def gate_settings(config: ModelConfig, small: bool, seed: int, changes: Mapping[str, Any]) -> GateSettings:
    """The settings for a model: no prompt is longer than its context."""
    base = GateSettings.small() if small else GateSettings()
    limit = int(_ROOM * config.max_position_embeddings)
    fitting = tuple(length for length in base.lengths if length <= limit) or (limit,)
    return dataclasses.replace(base, **{"lengths": fitting, "seed": seed, **changes})


def _importance(model: _Model, how: str, resume: bool, changes: Mapping[str, Any], bar: Bar):
    if how not in ("gates", "quick"):
        part = read_duo_scores(how, model.config)
        return part, _spread(part), {"file": pathlib.Path(how).name}
    settings = gate_settings(model.config, model.small, model.seed, changes)
    state = model.folder / STATE_FILE
    if not resume:
        state.unlink(missing_ok=True)
    if how == "quick":
        settings = dataclasses.replace(settings, examples=8 if model.small else 16)
    examples = passkey_examples(
        settings.examples, settings.lengths, model.tokenizer(), settings.seed, settings.needles, settings.words
    )
    made = {"prompts_sha256": _digest(examples), "arguments": dataclasses.asdict(settings)}
    if how == "quick":
        with bar("importance: quick estimate", len(examples)) as advance:
            part = quick_estimate(
                model.config, model.half(), examples, settings.window, lambda done, total: advance(1)
            )  # fmt: skip
        return part, _spread(part), made
    found = _gates(model, examples, settings, state, bar)
    part = Importance(found.scores, "gates")
    last = found.distances[-max(1, len(found.distances) // 10) :]
    return part, {**_spread(part), "last_distance": float(last.mean())}, made


def _gates(model: _Model, examples: list[Example], settings: GateSettings, state: pathlib.Path, bar: Bar) -> Gates:
    with bar("importance: gates", settings.steps) as advance:
        shown = 0

        def step(done):
            nonlocal shown
            advance(done.step - shown)  # the first step of a continued run brings the earlier ones along
            shown = done.step

        return optimise_gates(model.config, model.half(), examples, settings, state_file=state, progress=step)


def _costs(model: _Model, batches: tuple[int, ...], contexts: tuple[int, ...] | None, backend: str, bar: Bar):
    if contexts is None:
        wanted = (1024, 4096) if model.small else (8192, 32768, 131072)
        contexts = tuple(sorted({min(context, model.config.max_position_embeddings) for context in wanted}))
    with bar("costs", costs_lib.num_measurements(batches, contexts)) as advance:
        part: Costs = costs_lib.measure_costs(
            model.config, model.params, model.clo, batches=batches, contexts=contexts, backend=backend,
            progress=lambda what: advance(1),
        )  # fmt: skip
    figures = {"link_gb_per_s": {name: rate / 1e9 for name, rate in part.link_bytes_per_s.items()}}
    return part, figures, {"arguments": {"clo": dataclasses.asdict(model.clo), "backend": backend}}


def _spread(part: Importance) -> dict[str, float]:
    scores = part.scores
    return {
        "mean": float(scores.mean()),
        "share_above_0.9": float((scores > 0.9).mean()),
        "share_below_0.1": float((scores < 0.1).mean()),
    }


def _digest(examples: list[Example]) -> str:
    return calibrations.digest([example.tokens.tolist() for example in examples])
