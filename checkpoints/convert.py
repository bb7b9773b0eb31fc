"""From a Hugging Face folder or a GGUF file to a checkpoint folder.

All or nothing: everything is written into a sibling folder, flushed to disk and renamed. What a killed conversion
leaves is that one folder, which does not load and which the next conversion to the same place removes.
"""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import tokenizers

import clo_jax
from clo_jax.checkpoints import keys, orbax_io
from clo_jax.checkpoints.files import digests, files_below, flush, flush_tree, json_bytes
from clo_jax.checkpoints.gguf import GgufFile
from clo_jax.checkpoints.hf import HuggingFaceFolder
from clo_jax.checkpoints.load import model_config
from clo_jax.checkpoints.manifest import MANIFEST, PARAMS, PARTIAL_SUFFIX, Manifest, StoredFile
from clo_jax.checkpoints.source import Source, lossless_dtype
from clo_jax.checkpoints.verify import Verification, verify
from clo_jax.config import DTYPES, Dtype, ModelConfig
from clo_jax.errors import CheckpointError
from clo_jax.models import abstract_params

_REPLACED_SUFFIX = ".replaced"

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class ConvertResult:
    """What was written: `path`, architecture, dtype, number of tensors and their bytes, what was assumed (`notes`), and
    the comparison with the source where it was asked for."""

    path: Path
    config: ModelConfig
    dtype: str
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]
    verification: Verification | None
    seconds: float


def open_source(path: str | os.PathLike) -> Source:
    """A Hugging Face folder or a .gguf file.

    Raises:
      CheckpointError: neither, or see `HuggingFaceFolder` and `GgufFile`.
    """
    path = Path(path).expanduser().resolve()
    if path.is_dir():
        if not (path / "config.json").exists() and (found := sorted(path.glob("*.gguf"))):
            raise CheckpointError(f"{path}: a folder; name the file: {', '.join(str(file) for file in found)}")
        if (path / MANIFEST).exists():
            raise CheckpointError(f"{path}: is converted already")
        return HuggingFaceFolder(path)
    if path.is_file():
        return GgufFile(path)
    raise CheckpointError(f"{path}: no such file or folder")


def convert(
    source: str | os.PathLike,
    out: str | os.PathLike,
    *,
    dtype: Dtype | Literal["auto"] = "auto",
    verify: bool = False,
    force: bool = False,
    tokenizer: str | os.PathLike | None = None,
    with_tokenizer: bool = True,
    progress: Progress | None = None,
) -> ConvertResult:
    """Converts a model.

    Args:
      source: a Hugging Face folder (config.json and safetensors) or a .gguf file (Llama and Qwen2).
      out: folder to be made.
      dtype: of the parameters; "auto": the narrower of float32 and bfloat16 that holds the source exactly.
      verify: compare every tensor and the logits of a short prompt with the source, before `out` comes into being.
      force: replace `out` when it is a checkpoint, after the conversion succeeded.
      tokenizer: a tokenizer.json to take in place of the source's.
      with_tokenizer: False leaves the tokenizer out; the checkpoint then takes and gives token ids only.
      progress: called with a stage ("convert", "write", "verify"), bytes done, and bytes in all.

    Raises:
      CheckpointError: the source is damaged, incomplete or unsupported; `out` exists; the disk is full; verification
        failed. Nothing is left behind.
      ValueError: another dtype.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype: got {dtype!r}, wanted auto, {', '.join(DTYPES)}")
    if tokenizer is not None and not with_tokenizer:
        raise ValueError("tokenizer: got a file together with with_tokenizer=False, wanted one of them")
    start = time.monotonic()
    opened = open_source(source)
    out = _target(Path(out), opened.path, force)
    config = model_config(opened.config, opened.files[0])
    chosen = lossless_dtype(opened) if dtype == "auto" else dtype
    table = keys.match(opened, abstract_params(config, jnp.dtype(chosen)))
    texts = opened.texts(None if tokenizer is None else Path(tokenizer).expanduser(), with_tokenizer)
    _check_tokenizer(texts, config, opened.path if tokenizer is None else Path(tokenizer))
    report = progress or (lambda stage, done, total: None)
    verification = None
    try:
        with _partial(out) as folder:
            num_bytes = _write_params(folder / PARAMS, opened, table, jnp.dtype(chosen), report)
            for name, text in texts.items():
                (folder / name).write_bytes(text)
            manifest = _manifest(folder, opened, chosen, len(table), num_bytes)
            (folder / MANIFEST).write_bytes(json_bytes(manifest.to_json()))
            if verify:
                verification = _verify(opened, folder / PARAMS, config, chosen, num_bytes, report)
            flush_tree(folder)
            _publish(folder, out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error.strerror or error}") from error
    return ConvertResult(
        out, config, chosen, len(table), num_bytes, opened.notes, verification, time.monotonic() - start
    )


def _write_params(item: Path, source: Source, table: list[keys.Entry], dtype: np.dtype, report: Progress) -> int:
    """Reads tensor by tensor and writes the item; returns the bytes of all parameters."""
    total = sum(int(np.prod(entry.shape)) for entry in table) * dtype.itemsize
    leaves, done = {}, 0
    for entry in table:
        array = keys.to_ours(source.read(entry.name), entry, dtype)
        done += array.nbytes
        leaves[entry.path] = orbax_io.on_host(array)
        report("convert", done, total)
    report("write", 0, total)
    orbax_io.save(item, keys.unflatten(leaves))
    report("write", total, total)
    return total


def _verify(source: Source, item: Path, config: ModelConfig, dtype: str, total: int, report: Progress) -> Verification:
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report("verify", done, total)

    return verify(open_source(source.path), item, config, dtype, advance)


def _check_tokenizer(texts: dict[str, bytes], config: ModelConfig, origin: Path) -> None:
    """Raises a `CheckpointError` when tokenizer.json is malformed or has ids that the model has no rows for."""
    if "tokenizer.json" not in texts:
        return
    try:
        vocabulary = tokenizers.Tokenizer.from_str(texts["tokenizer.json"].decode("utf-8")).get_vocab()
    # The library raises plain Exception for a malformed file.
    except Exception as error:
        raise CheckpointError(f"{origin}: not a readable tokenizer.json: {error}") from None
    if vocabulary and max(vocabulary.values()) >= config.vocab_size:
        raise CheckpointError(
            f"{origin}: the tokenizer has token {max(vocabulary.values())}, the model only {config.vocab_size} rows"
        )


def _manifest(folder: Path, source: Source, dtype: str, num_tensors: int, num_bytes: int) -> Manifest:
    written = files_below(folder)
    return Manifest(
        source_kind=source.kind,
        source_name=source.path.name,
        source_files=dict(zip([file.name for file in source.files], digests(source.files), strict=True)),
        converter=f"clo-jax {clo_jax.__version__}",
        dtype=dtype,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        files={
            file.relative_to(folder).as_posix(): StoredFile(file.stat().st_size, digest)
            for file, digest in zip(written, digests(written), strict=True)
        },
    )


def _target(out: Path, source: Path, force: bool) -> Path:
    """`out` made absolute, after the checks that need no work."""
    out = out.expanduser().absolute()
    out = out.parent.resolve() / out.name
    replaced = out.with_name(f".{out.name}{_REPLACED_SUFFIX}")
    if replaced.exists() and not out.exists():
        replaced.rename(out)  # a replacement was killed between its two renames
    if out == source or out in source.parents:
        raise CheckpointError(f"{out}: holds the source; convert to another folder")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such folder to write into")
    if os.path.lexists(out):
        if not force:
            raise CheckpointError(f"{out}: exists already; --force (force=True) replaces a checkpoint")
        if out.is_symlink() or not (out / MANIFEST).is_file():
            raise CheckpointError(f"{out}: exists and is no checkpoint folder: not replaced")
    return out


@contextlib.contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """The sibling folder to write into: locked against a second conversion, removed on any error."""
    folder = out.with_name(f".{out.name}{PARTIAL_SUFFIX}")
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{out}: another conversion is writing it") from None
        try:
            _empty(folder)
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _empty(folder: Path) -> None:
    """Removes what a killed conversion left."""
    for child in folder.iterdir():
        shutil.rmtree(child) if child.is_dir() else child.unlink()


def _publish(folder: Path, out: Path) -> None:
    """Renames the finished folder to `out`, in place of an older checkpoint where there is one."""
    replaced = out.with_name(f".{out.name}{_REPLACED_SUFFIX}")
    shutil.rmtree(replaced, ignore_errors=True)
    if out.exists():
        out.rename(replaced)
    folder.rename(out)
    flush(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)
