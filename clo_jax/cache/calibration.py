"""What a calibration measured of a model, and its two files beside the checkpoint.

CKPT/calibration/calibration.json holds figures, where each part came from, and the name and digest of the one
safetensors file with the arrays. The JSON file is replaced last and in one step, so that an interrupted update leaves
what was there before; it carries a digest of itself, so that a cut or edited file is noticed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from clo_jax.cache.calibration_parts import PARTS, Choice, Costs, HashWeights, Importance, Similarity, Trace
from clo_jax.config import ModelConfig
from clo_jax.errors import CheckpointError

FORMAT_VERSION = 1
FOLDER = "calibration"
FILE = "calibration.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Everything optional. `provenance` has one entry per part, by `part_name`: versions, seeds, digests of prompts
    and checkpoint, arguments, figures."""

    importance: Importance | None = None
    hash_weights: tuple[HashWeights, ...] = ()
    choice: Choice | None = None
    similarity: Similarity | None = None
    trace: Trace | None = None
    costs: Costs | None = None
    provenance: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    path: Path | None = None  # the folder that it was read from

    def hash_of(self, retriever: str, hash_bits: int) -> HashWeights | None:
        """The weights for codes of that kind and length, or None."""
        return self.parts().get(f"hash-{retriever}-{hash_bits}")

    def parts(self) -> dict[str, Any]:
        """The parts that are there, by name."""
        single = (self.importance, self.choice, self.similarity, self.trace, self.costs)
        return {part.part_name: part for part in (*single, *self.hash_weights) if part is not None}

    def checkpoint_digests(self) -> set[str]:
        """Digests of the checkpoints that the parts were made with, as their provenance says."""
        return {entry["checkpoint_sha256"] for entry in self.provenance.values() if "checkpoint_sha256" in entry}

    def require_fit(self, model: ModelConfig) -> Self:
        """Returns itself; a `CheckpointError` names the file and the first part whose shape is not the model's."""
        for name, part in self.parts().items():
            problem = part.misfit(model)
            if problem:
                where = f"{self.path / FILE}: " if self.path else ""
                raise CheckpointError(f"{where}{name}: {problem}; it was made for another model: calibrate again")
        return self

    def with_parts(self, *parts: Any, provenance: Mapping[str, Any]) -> "Calibration":
        """A copy with these parts in place of those of the same names; the others stay."""
        named = {part.part_name: part for part in parts}
        merged = self.parts() | named
        return _assemble(merged, {**self.provenance, **{name: dict(provenance) for name in named}}, self.path)


def _assemble(named: Mapping[str, Any], provenance: Mapping[str, Mapping[str, Any]], path: Path | None) -> Calibration:
    fields: dict[str, Any] = {name: part for name, part in named.items() if not isinstance(part, HashWeights)}
    hashes = tuple(named[name] for name in sorted(named) if isinstance(named[name], HashWeights))
    return Calibration(**fields, hash_weights=hashes, provenance=provenance, path=path)


def read(folder: str | os.PathLike) -> Calibration:
    """Reads CKPT/calibration.

    Raises:
      CheckpointError: names the file that is absent, cut, changed, or of another format.
    """
    folder = Path(folder).expanduser().resolve()
    head = _read_head(folder / FILE)
    tensors = folder / head["tensors"]["file"]
    data = _bytes(tensors)
    if hashlib.sha256(data).hexdigest() != head["tensors"]["sha256"]:
        raise CheckpointError(f"{tensors}: cut or changed since it was written; calibrate again")
    try:
        arrays = load_arrays(data)
        named = {}
        for name, facts in head["parts"].items():
            own = {key.rpartition("/")[2]: array for key, array in arrays.items() if key.rpartition("/")[0] == name}
            named[name] = PARTS[name.partition("-")[0]].from_stored(own, facts)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / FILE}: cannot be understood ({error}); calibrate again") from None
    return _assemble(named, head["provenance"], folder)


def find(
    given: str | os.PathLike | None, checkpoint: Path, sources: Mapping[str, str], model: ModelConfig
) -> Calibration | None:
    """The calibration that a run uses.

    Args:
      given: "auto": the one beside the checkpoint, or None where there is none; a folder, which must hold one; None.
      checkpoint: the checkpoint's folder. sources: digests of the files that it was converted from, by name.
      model: what every part must fit.

    Raises:
      CheckpointError: see `read` and `Calibration.require_fit`; the one beside the checkpoint must also have been made
        with these weights (one that is given by path may be a relative's, such as the model before a fine-tuning).
    """
    if given is None:
        return None
    found = read_if_there(checkpoint / FOLDER) if given == "auto" else read(given)
    if found is None:
        return None
    if given == "auto" and found.checkpoint_digests() - {digest(dict(sources))}:
        raise CheckpointError(
            f"{found.path / FILE}: made with other weights than this checkpoint's; calibrate again, or name the folder "
            "if that is meant"
        )
    return found.require_fit(model)


def read_if_there(folder: str | os.PathLike) -> Calibration | None:
    """`read`, or None where there is no calibration.json."""
    return read(folder) if (Path(folder).expanduser() / FILE).exists() else None


def update(
    folder: str | os.PathLike, *parts: Any, provenance: Mapping[str, Any], model: ModelConfig | None = None
) -> Calibration:
    """Writes parts into CKPT/calibration (made when absent); parts of other names stay as they are.

    Args:
      folder: the calibration folder.
      parts: `Importance`, `HashWeights`, `Choice`, `Similarity`, `Trace`, `Costs`.
      provenance: what made them, as JSON values: versions, seed, prompts_sha256, checkpoint_sha256, arguments, figures.
      model: what all parts must fit, those that were there before included.

    Returns:
      What the folder holds now.

    Raises:
      CheckpointError: what is there cannot be read, does not fit, or the folder cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    found = (read_if_there(folder) or Calibration(path=folder)).with_parts(*parts, provenance=provenance)
    if model is not None:
        found.require_fit(model)
    _write(folder, found)
    return found


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, the same whatever the order of its keys: of prompts (lists of token ids), of a
    checkpoint (its source files' digests by name)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _write(folder: Path, calibration: Calibration) -> None:
    arrays, facts = {}, {}
    for name, part in calibration.parts().items():
        own, facts[name] = part.stored()
        arrays |= {f"{name}/{key}": np.ascontiguousarray(array) for key, array in own.items()}
    data = save_arrays(arrays)
    sha256 = hashlib.sha256(data).hexdigest()
    head = {
        "format_version": FORMAT_VERSION,
        "tensors": {"file": f"calibration-{sha256[:12]}.safetensors", "sha256": sha256},
        "parts": facts,
        "provenance": calibration.provenance,
    }
    head["sha256"] = digest(head)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / head["tensors"]["file"], data)
        _replace(folder / FILE, (json.dumps(head, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
        for old in folder.glob("calibration-*.safetensors"):
            if old.name != head["tensors"]["file"]:
                with contextlib.suppress(FileNotFoundError):
                    old.unlink()
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}") from None


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_head(path: Path) -> dict[str, Any]:
    data = _bytes(path)
    try:
        head = json.loads(data)
        stored = head.pop("sha256")
        version = head["format_version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: cut or no calibration; calibrate again") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version: got {version!r}, this release reads {FORMAT_VERSION}; calibrate again, or use "
            "the release that wrote it"
        )
    if stored != digest(head):
        raise CheckpointError(f"{path}: changed since it was written; calibrate again")
    return head
