"""Parameters to and from an Orbax item. The only file that imports orbax, and only inside functions: the import takes
over a second."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from clo_jax.checkpoints import keys
from clo_jax.errors import CheckpointError

# Stored in pieces of at most this size: a shard is then read without decoding its whole array, and what is in flight
# during a save or a load stays bounded beside the arrays themselves. Orbax 0.12.8 heeds the limit on writing for JAX
# arrays only: a tree of 704 MB took 1,303 MB more as NumPy arrays and 114 MB more as JAX arrays (measured).
_CHUNK_BYTES = 16 << 20
_IN_FLIGHT_BYTES = 256 << 20
_FILE_BYTES = 256 << 20
_ITEM_MARK = "orbax.checkpoint"

Tree = Mapping[Any, Any]


def resolved(path: str | os.PathLike) -> Path:
    """`path` as Orbax wants it: absolute, without `~`, links and trailing slashes."""
    return Path(path).expanduser().resolve()


def _context():
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.array.saving.ocdbt_target_data_file_size = _FILE_BYTES
    context.memory.write_concurrent_bytes = _IN_FLIGHT_BYTES
    context.memory.read_concurrent_bytes = _IN_FLIGHT_BYTES
    return context


def on_host(array: np.ndarray) -> jax.Array:
    """A JAX array in host memory (in device memory when JAX_PLATFORMS leaves the CPU out)."""
    try:
        return jax.device_put(array, jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return jax.device_put(array)


def save(path: str | os.PathLike, params: Tree) -> None:
    """Writes nested dicts of JAX arrays as a new Orbax item.

    Args:
      path: folder to be made; its parent must exist.

    Raises:
      CheckpointError: `path` exists, or Orbax could not write it.
    """
    from orbax.checkpoint import v1 as ocp

    path = resolved(path)
    if path.exists():
        raise CheckpointError(f"{path}: exists already")
    try:
        with _context():
            ocp.save(path, params)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


def metadata(path: str | os.PathLike) -> dict[keys.Path, jax.ShapeDtypeStruct]:
    """Shape and dtype of every stored array by its path (layer numbers as integers); reads no array.

    Raises:
      CheckpointError: `path` is no complete Orbax item; says so when it is a level too deep or too shallow.
    """
    from orbax.checkpoint import v1 as ocp

    path = resolved(path)
    _check_level(path)
    try:
        with _context():
            stored = ocp.metadata(path).metadata
        leaves = keys.flatten(stored)
        return {
            tuple(int(key) if key.isdigit() else key for key in leaf_path): jax.ShapeDtypeStruct(
                tuple(leaf.shape), np.dtype(leaf.dtype)
            )
            for leaf_path, leaf in leaves.items()
        }
    # Damaged metadata surfaces as whatever its parser happened to stumble over.
    except Exception as error:
        raise CheckpointError(f"{path}: its metadata cannot be read: {_first_line(error)}") from error


def load(path: str | os.PathLike, abstract: Tree) -> dict[Any, Any]:
    """Reads an item into `abstract`: nested dicts of `jax.ShapeDtypeStruct` with shapes as stored, any float dtype, and
    the shardings to load into (None: the default device). Shardings at the time of saving do not matter. Each device's
    shard is read by itself; nothing is written.

    A leaf may also be None: it is left out and comes back as None.

    Raises:
      CheckpointError: no complete item, arrays other than those wanted (all listed), or unreadable data.
    """
    from orbax.checkpoint import v1 as ocp

    path = resolved(path)
    _check_level(path)
    wanted = keys.flatten(abstract)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def target(leaf: jax.ShapeDtypeStruct | None):
        if leaf is None:
            return ocp.PLACEHOLDER
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device)

    try:
        with _context():
            loaded = ocp.load(path, keys.unflatten({leaf_path: target(leaf) for leaf_path, leaf in wanted.items()}))
    except Exception as error:
        # Only now, and not before each load: TensorStore 0.1.86 keeps 10 kB for every array whose metadata is read.
        _check_arrays(path, wanted, metadata(path))
        raise CheckpointError(f"{path}: cannot be loaded: {_first_line(error)}") from error
    return keys.unflatten({p: None if leaf is ... else leaf for p, leaf in keys.flatten(loaded).items()})


def _check_arrays(path: Path, wanted: Mapping, stored: Mapping) -> None:
    problems = [f"missing: {keys.path_name(p)}" for p in wanted if p not in stored]
    problems += [f"unexpected: {keys.path_name(p)} {list(stored[p].shape)}" for p in stored if p not in wanted]
    problems += [
        f"wrong shape: {keys.path_name(p)}: got {list(stored[p].shape)}, wanted {list(leaf.shape)}"
        for p, leaf in wanted.items()
        if leaf is not None and p in stored and stored[p].shape != leaf.shape
    ]
    if problems:
        raise CheckpointError(f"{path}: arrays do not match config.json:\n  " + "\n  ".join(problems))


def _check_level(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path}: {'a file' if path.exists() else 'nothing is there'}; wanted an Orbax item")
    if (path / _ITEM_MARK).exists():
        return
    if (path.parent / _ITEM_MARK).exists():
        raise CheckpointError(f"{path}: inside an Orbax item, one level too deep; wanted {path.parent}")
    if inner := [child.name for child in sorted(path.iterdir()) if (child / _ITEM_MARK).exists()]:
        raise CheckpointError(f"{path}: one level above an Orbax item; wanted one of: {', '.join(inner)}")
    raise CheckpointError(f"{path}: not an Orbax item: {_ITEM_MARK} is missing in it")


def _first_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return text.splitlines()[0][:500]
