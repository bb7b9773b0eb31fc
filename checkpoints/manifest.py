"""The checkpoint folder: its manifest, what kind of folder a path is, whether its files are as they were written."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clo_jax.checkpoints.files import digests, read_json
from clo_jax.config import DTYPES
from clo_jax.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "clo_jax.json"
PARAMS = "params"
PARTIAL_SUFFIX = ".partial"
_LARGE_BYTES = 4 << 20
_ORBAX_MARK = "orbax.checkpoint"


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """Size and SHA-256 of a file of the checkpoint when it was written."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """clo_jax.json.

    `source_kind`: safetensors or gguf; `source_name`: name of the folder or file; `source_files`: SHA-256 by name.
    `dtype`: of the parameters; `num_tensors`, `num_bytes`: of all of them. `files`: what the checkpoint consists of, by
    path below the folder. A file without an entry is not checked.
    """

    source_kind: str
    source_name: str
    source_files: Mapping[str, str]
    converter: str
    dtype: str
    num_tensors: int
    num_bytes: int
    files: Mapping[str, StoredFile]
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], file: Path) -> "Manifest":
        """Raises a `CheckpointError` that names `file` for another format version or a malformed entry."""
        version = value.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{file}: format_version: got {version!r}, this release reads {FORMAT_VERSION}; convert again, or use "
                "the release that wrote it"
            )
        kinds = {"source_kind": str, "source_name": str, "source_files": dict, "converter": str, "dtype": str}
        kinds |= {"num_tensors": int, "num_bytes": int, "files": dict, "format_version": int}
        for key, kind in kinds.items():
            if not isinstance(value.get(key), kind):
                raise CheckpointError(f"{file}: {key}: got {value.get(key)!r}, wanted {kind.__name__}")
        if value["dtype"] not in DTYPES:
            raise CheckpointError(f"{file}: dtype: got {value['dtype']!r}, wanted {' or '.join(DTYPES)}")
        try:
            files = {
                name: StoredFile(int(entry["bytes"]), str(entry["sha256"])) for name, entry in value["files"].items()
            }
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{file}: files: wanted bytes and sha256 for each") from None
        return cls(**{key: value[key] for key in kinds} | {"files": files})


def locate(path: str | os.PathLike) -> Path:
    """The checkpoint folder at `path` (relative, with `~`, a link or a trailing slash alike), made absolute.

    Raises:
      CheckpointError: no checkpoint is there; says what is there instead: nothing, a Hugging Face folder, a GGUF file,
        an unfinished conversion, or a checkpoint one level up or down.
    """
    given, path = path, Path(path).expanduser().resolve()
    if not path.exists():
        raise CheckpointError(f"{given}: no such folder")
    if not path.is_dir():
        hint = f"; convert it first: clo-jax convert {given} OUT" if path.suffix == ".gguf" else ""
        raise CheckpointError(f"{given}: a file, wanted a checkpoint folder{hint}")
    if path.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(f"{given}: left over from an unfinished conversion; convert again")
    if (path / MANIFEST).is_file():
        return path
    for levels, parent in enumerate(path.parents[:2], start=1):
        if (parent / MANIFEST).is_file() and (path.name == PARAMS or path.parent.name == PARAMS):
            raise CheckpointError(f"{given}: inside a checkpoint, {levels} level(s) too deep; wanted {parent}")
    inner = sorted(child.name for child in path.iterdir() if (child / MANIFEST).is_file())
    if inner:
        raise CheckpointError(f"{given}: one level above a checkpoint; wanted one of: {', '.join(inner)}")
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        raise CheckpointError(f"{given}: a Hugging Face folder; convert it first: clo-jax convert {given} OUT")
    if (path / PARAMS).exists() or (path / _ORBAX_MARK).exists():
        raise CheckpointError(f"{given}: {MANIFEST} is missing: not a folder that clo-jax convert finished")
    raise CheckpointError(f"{given}: no checkpoint: {MANIFEST} is missing")


def read_manifest(folder: Path) -> Manifest:
    return Manifest.from_json(read_json(folder / MANIFEST), folder / MANIFEST)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises a `CheckpointError` that lists the files that are missing or have another size than when written."""
    problems = []
    for name, stored in manifest.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != stored.bytes:
            problems.append(f"{name}: {path.stat().st_size} bytes, was written with {stored.bytes}")
    _report(folder, problems)


def check_digests(folder: Path, manifest: Manifest, *, large: bool) -> None:
    """Raises a `CheckpointError` that lists the files whose contents differ from what was written.

    Args:
      large: look at the files of 4 MiB and more, or at all the others. The others (names, shapes, configuration) are
        checked before anything reads them, the large ones while they are being read.
    """
    chosen = {name: stored for name, stored in manifest.files.items() if (stored.bytes >= _LARGE_BYTES) == large}
    found = digests(folder / name for name in chosen)
    _report(
        folder,
        [
            f"{name}: SHA-256 differs from what was written"
            for (name, stored), digest in zip(chosen.items(), found, strict=True)
            if stored.sha256 != digest
        ],
    )


def _report(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{folder}: changed since it was converted:\n  " + "\n  ".join(problems) + "\nConvert it again; where the "
            f"change is meant, remove the entry under files in {MANIFEST}"
        )
