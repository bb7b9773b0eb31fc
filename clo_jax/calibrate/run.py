"""A whole calibration: which parts, in which order, and what is kept of where they came from."""

import dataclasses
import pathlib
import shutil
import time
from collections.abc import Mapping
from typing import Any

import jax

from clo_jax.cache import calibration as calibrations
from clo_jax.cache.calibration import Calibration
from clo_jax.calibrate import parts as making
from clo_jax.calibrate.parts import Bar, Made, Model
from clo_jax.checkpoints import load_checkpoint
from clo_jax.config import CloConfig
from clo_jax.versions import versions


@dataclasses.dataclass(frozen=True)
class Parts:
    """What to calibrate. `importance`: "gates", "quick", or the path of a DuoAttention file; None: leave it."""

    importance: str | None = None
    hash: bool = False
    similarity: bool = False
    costs: bool = False

    def names(self) -> list[str]:
        """In the order in which they are made: similarity wants scores and projections."""
        return [name for name in ("importance", "hash", "similarity", "costs") if getattr(self, name)]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a calibration left: the parts now there; seconds and figures by part."""

    calibration: Calibration
    seconds: Mapping[str, float]
    figures: Mapping[str, Mapping[str, Any]]


def calibrate(
    checkpoint: str | pathlib.Path, parts: Parts, *, small: bool, seed: int = 0, resume: bool = False,
    gates: Mapping[str, Any] | None = None, clo: CloConfig | None = None, batches: tuple[int, ...] = (1,),
    contexts: tuple[int, ...] | None = None, backend: str = "auto", bar: Bar | None = None,
) -> Outcome:  # fmt: skip
    """Calibrates parts of a model and writes each to CKPT/calibration as soon as it is there.

    Args:
      checkpoint: folder that `clo-jax convert` made.
      parts: what to do; other parts of an earlier calibration stay.
      small: short prompts and few steps, for two CPU cores and a small model.
      seed: of prompts, their order, and projections.
      resume: continue gates and hash functions that were interrupted; without it, what is there of them is thrown away.
      gates: changes of `GateSettings`.
      clo: settings that costs and similarity are measured with. batches, contexts: pairs whose layer time is measured.
      backend: of the timed layers.
      bar: makes a progress bar: bar(what, total) is a context that gives advance(n).

    Raises:
      ValueError: no parts, or settings that make no sense.
      CheckpointError: no readable checkpoint; a calibration there that is damaged or of another model; a state to be
        continued that is of other settings.
    """
    if not parts.names():
        raise ValueError("parts: got none, wanted at least one")
    bar = bar or Bar()
    dtype = "float32" if jax.default_backend() == "cpu" else "auto"  # a CPU is faster in float32
    with bar("loading", None):
        config, params, info = load_checkpoint(checkpoint, dtype=dtype)
    model = Model(config, params, info, clo or CloConfig(), small, seed, resume)
    found = calibrations.read_if_there(model.folder)  # a damaged one is named now, not after hours
    if found is not None:
        found.require_fit(config)
    work = model.folder / making.WORK_FOLDER
    if parts.hash and not resume:
        shutil.rmtree(work, ignore_errors=True)
    seconds: dict[str, float] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name in parts.names():
        start = time.perf_counter()
        if name == "importance":
            made = making.importance(model, parts.importance, gates or {}, bar)
        elif name == "hash":
            made = making.hashes(model, bar)
        elif name == "similarity":
            made = making.similarities(model, found, bar)
        else:
            made = making.costs(model, batches, contexts, backend, bar)
        seconds[name], figures[name] = time.perf_counter() - start, made.figures
        found = calibrations.update(
            model.folder, *made.kept, provenance=_provenance(model, made, seconds[name]), model=config
        )  # fmt: skip
        if name == "importance":
            (model.folder / making.STATE_FILE).unlink(missing_ok=True)
        if name == "hash":
            shutil.rmtree(work, ignore_errors=True)
    return Outcome(found, seconds, figures)


def _provenance(model: Model, made: Made, seconds: float) -> dict[str, Any]:
    return {
        "checkpoint_sha256": calibrations.digest(dict(model.info.manifest.source_files)),
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "seed": model.seed,
        "small": model.small,
        "seconds": seconds,
        "figures": made.figures,
        **made.origin,
    }
