"""A checkpoint folder into memory."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from clo_jax.checkpoints import orbax_io
from clo_jax.checkpoints.files import read_json, read_json_if_there
from clo_jax.checkpoints.manifest import PARAMS, Manifest, check_digests, check_sizes, locate, read_manifest
from clo_jax.config import DTYPES, Dtype, ModelConfig
from clo_jax.errors import CheckpointError
from clo_jax.models import abstract_params, config_from_hf
from clo_jax.text import stop_token_ids

_CALIBRATION = "calibration"


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """What is known of a checkpoint beside its parameters.

    `path`: absolute. `dtype`: of the stored parameters. `generation_config`: that file, empty when there is none.
    `stop_token_ids`: from generation_config.json, else config.json, else the tokenizer. `calibration`: present or not.
    """

    path: Path
    manifest: Manifest
    generation_config: Mapping[str, Any]
    stop_token_ids: tuple[int, ...]
    calibration: bool

    @property
    def dtype(self) -> str:
        return self.manifest.dtype


def read_info(path: str | os.PathLike) -> tuple[ModelConfig, CheckpointInfo]:
    """Everything but the parameters: architecture and `CheckpointInfo`. Checks that all files are there in full size.

    Raises:
      CheckpointError: see `load_checkpoint`.
    """
    folder = locate(path)
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    config = model_config(read_json(folder / "config.json"), folder / "config.json")
    return config, CheckpointInfo(
        path=folder,
        manifest=manifest,
        generation_config=read_json_if_there(folder / "generation_config.json") or {},
        stop_token_ids=stop_token_ids(folder),
        calibration=(folder / _CALIBRATION).is_dir(),
    )


def model_config(values: Mapping[str, Any], file: Path) -> ModelConfig:
    """`config_from_hf`, with the file named in what it raises."""
    try:
        return config_from_hf(values)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def load_checkpoint(
    path: str | os.PathLike,
    *,
    dtype: Dtype | Literal["auto"] = "auto",
    sharding: jax.sharding.Sharding | Mapping[Any, Any] | None = None,
    check: bool = True,
) -> tuple[ModelConfig, dict[Any, Any], CheckpointInfo]:
    """Loads a folder that `clo-jax convert` made. Reads only; each device's shard is read by itself.

    Args:
      path: the folder; relative, `~`, links and trailing slashes are fine.
      dtype: of the parameters in memory; "auto": as stored.
      sharding: where to: one sharding for all, or nested dicts of them like the parameters. None: the default device.
      check: compare each file with its SHA-256 (large ones while they are read, by a few threads). Sizes are always
        compared.

    Returns:
      The architecture; the parameters, nested dicts of `jax.Array` (the nesting of `models.build`); what else is known.

    Raises:
      CheckpointError: no checkpoint there (the message says what is), an unknown format version, a missing, cut or
        changed file, an unsupported configuration, arrays that do not match it.
      ValueError: another dtype.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype: got {dtype!r}, wanted auto, {', '.join(DTYPES)}")
    config, info = read_info(path)
    if check:
        check_digests(info.path, info.manifest, large=False)
    abstract = abstract_params(config, np.dtype(jax.numpy.dtype(info.dtype if dtype == "auto" else dtype)))
    if sharding is not None:
        shardings = (
            jax.tree.map(lambda _: sharding, abstract) if isinstance(sharding, jax.sharding.Sharding) else sharding
        )
        abstract = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), abstract, shardings
        )
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        checked = pool.submit(check_digests, info.path, info.manifest, large=True) if check else None
        try:
            params = orbax_io.load(info.path / PARAMS, abstract)
        except CheckpointError:
            # A changed file explains a failed load better than Orbax does.
            if checked is not None:
                checked.result()
            raise
        if checked is not None:
            checked.result()
    return config, params, info
