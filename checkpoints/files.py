"""Small file work shared by the readers and the writer: JSON, digests, flushing to disk."""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clo_jax.errors import CheckpointError

_BLOCK_BYTES = 1 << 20
_DIGEST_THREADS = 4  # hashlib releases the GIL


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is there twice")
        found[key] = value
    return found


def parse_json(text: bytes, name: str | os.PathLike) -> dict[str, Any]:
    """A JSON object; `name` is the file named in the `CheckpointError` when it is none, or repeats a key."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not a valid JSON file: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: got a JSON {type(value).__name__}, wanted an object")
    return value


def read_bytes(path: Path) -> bytes:
    """Contents of a file; a `CheckpointError` names it when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; a `CheckpointError` names the file when it is absent, unreadable or malformed."""
    return parse_json(read_bytes(path), path)


def read_json_if_there(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def sha256(path: Path) -> str:
    """Hex digest of a file, read in blocks."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def digests(paths: Iterable[Path]) -> list[str]:
    """`sha256` of several files, a few at a time, in their order."""
    with concurrent.futures.ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        return list(pool.map(sha256, paths))


def files_below(folder: Path) -> list[Path]:
    """Every file below `folder`, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flush_tree(folder: Path) -> None:
    """fsync of every file and folder below and including `folder`, so that a rename after it is safe to keep."""
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
