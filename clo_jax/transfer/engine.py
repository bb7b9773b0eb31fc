"""The transfer engine: host rows, selected-rows buffers and the threads that move rows between them."""

import contextlib
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Sequence

import jax
import ml_dtypes
import numpy as np

from clo_jax import _host
from clo_jax.config import KV_DTYPES, KvDtype, require
from clo_jax.errors import MemoryPlanError, TransferError
from clo_jax.transfer.arenas import Arenas
from clo_jax.transfer.choice import GPU_BACKENDS, choose_backend, default_threads
from clo_jax.transfer.counters import Counters

_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


@contextlib.contextmanager
def transfer_errors() -> Iterator[None]:
    """Around running programs: an op's error about its engine becomes a TransferError in the engine's words."""
    try:
        yield
    # JAX raises the same failure as one or the other: a ValueError where a compiled call fails before it returns.
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        why = re.search(r"clo_\w+: (?:transfer failed: (.*)|(engine \d+ is closed.*))", str(error))
        if why is None:
            raise
        raise TransferError(why[1] or why[2]) from error


class Engine(Arenas):
    """Arenas and transfer threads for the offloaded KV heads of a model. Usable from several Python threads.

    Args:
      kv_heads: offloaded KV heads Ko of each layer; 0 for a layer that keeps everything on the device.
      batch: sequences B.
      max_tokens: context capacity S.
      num_slots: slots C of each head in the selected-rows buffer.
      head_dim: D.
      dtype: float32, bfloat16 or float16, of activations and of rows.
      kv_dtype: "auto", or "int8" or "fp8": rows are quantized when they are offloaded (`ops.quantized_rows`).
      backend: who moves the rows (clo_jax.transfer.backends lists them). "pull", "bar" and "staged" serve programs on a
        GPU, "host" programs on the CPU. "auto" is the first of them that works where JAX runs.
      threads: transfer threads; None for `default_threads`. "pull" has none.
      kv_offload: False keeps rows where they are: attention reads them through the slot table, and nothing moves.
      timeout_s: bound in seconds of every wait for rows.
      progress: called with (bytes done, bytes in all) while host rows are pinned for a GPU, which takes seconds for
        tens of gigabytes.

    Raises:
      ValueError: a bad argument, or a backend that is unknown or cannot be had here; says why.
      MemoryPlanError: the system refuses the memory; names the bytes needed.
      TransferError: the system refuses the threads.

    Attributes:
      skipped: (name, why not) of each backend that "auto" would have taken before this one.
    """

    def __init__(
        self,
        kv_heads: Sequence[int],
        batch: int,
        max_tokens: int,
        num_slots: int,
        head_dim: int,
        dtype,
        backend: str = "auto",
        threads: int | None = None,
        kv_offload: bool = True,
        timeout_s: float = 30.0,
        progress: Callable[[int, int], None] | None = None,
        kv_dtype: KvDtype = "auto",
    ):
        self._native = None
        self._dtype = np.dtype(dtype)
        if self._dtype not in _DTYPES:
            raise ValueError(f"dtype: got {self._dtype}, wanted float32, bfloat16 or float16")
        require(kv_dtype in KV_DTYPES, "kv_dtype", kv_dtype, "auto, int8 or fp8")
        self._rows_dtype = self._dtype if kv_dtype == "auto" else np.dtype(np.uint8)
        backend, self.skipped = choose_backend() if backend == "auto" else (str(backend), ())
        self._threads = default_threads(backend) if threads is None else _integer("threads", threads)
        self._kv_offload = bool(kv_offload)
        self._programs: set[Hashable] = set()
        kv_heads = [_integer("kv_heads", n) for n in kv_heads]
        self._layers = len(kv_heads)
        try:
            self._native = _host.Engine(
                kv_heads=kv_heads,
                batch=_integer("batch", batch),
                max_tokens=_integer("max_tokens", max_tokens),
                num_slots=_integer("num_slots", num_slots),
                head_dim=_integer("head_dim", head_dim),
                dtype=self._dtype.name,
                kv_dtype=kv_dtype,
                backend=backend,
                device=jax.local_devices()[0].local_hardware_id if backend in GPU_BACKENDS else -1,
                threads=self._threads,
                offload=self._kv_offload,
                timeout_s=float(timeout_s),
                progress=progress,
            )
        except MemoryError as error:
            raise MemoryPlanError(str(error)) from error
        except RuntimeError as error:  # a thread that the system refuses, or a device that has failed
            raise TransferError(f"the transfer engine could not be started: {error}") from error

    @property
    def handle(self) -> int:
        """Number that ops name the engine by; never 0."""
        return self._live().handle

    @property
    def backend(self) -> str:
        """Name of the backend; what "auto" stood for."""
        return self._live().backend

    @property
    def link(self) -> str:
        """What maps device memory for backend "bar": "libgdrapi" or "Vulkan"; empty for the others."""
        return self._live().link

    @property
    def threads(self) -> int:
        """Transfer threads; 0 for backend "pull" and without kv_offload."""
        return self._threads if self._kv_offload and self.backend != "pull" else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host rows and requests; 0 without kv_offload."""
        return self._live().host_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of selected rows and slot tables; without kv_offload everything."""
        return self._live().device_bytes

    def counters(self) -> Counters:
        """A snapshot of the counts."""
        return Counters(**self._live().counters())

    def clear_counters(self) -> None:
        """Sets every count to 0."""
        self._live().clear_counters()

    @contextlib.contextmanager
    def serving(self, requests: int, program: Hashable | None) -> Iterator[None]:
        """Around one run of a program: `begin`, then `end` once everything that the program computes is there.

        Compiling a program and loading its kernels waits for the device, which a transfer kernel that waits for the
        program would hold up. So the first run of each `program` goes without `begin`: its rows arrive all the same,
        one layer at a time.

        Args:
          requests: as for `begin`.
          program: names the compiled program. None: never with `begin`.
        """
        if program is not None and program in self._programs:
            self.begin(requests)
        try:
            yield
        finally:
            self.end()
        if program is not None:
            self._programs.add(program)

    def begin(self, requests: int) -> None:
        """Before a program that posts up to `requests` requests, one of each layer with offloaded heads in turn, and
        that has run before: launches what serves them beside it. Nothing for backend host.

        Raises:
          TransferError: the last `begin` has no `end`, or the launch failed.
        """
        native = self._live()
        try:
            native.begin(_integer("requests", requests))
        except RuntimeError as error:
            raise TransferError(str(error)) from error

    def end(self) -> None:
        """After the program: ends what `begin` launched.

        Raises:
          TransferError: a transfer since the last `end` failed; names layer, backend and request.
        """
        why = self._live().end()
        if why:
            raise TransferError(why)

    def reset(self) -> None:
        """Empties all slot tables, clears failures and restarts the threads, dead ones too. Keeps rows and counters.

        No program that uses the engine may be running."""
        self._live().reset()

    def abort(self, why: str) -> None:
        """Makes every wait, present and future, fail with `why` until `reset`."""
        self._live().abort(why)

    def close(self) -> None:
        """Ends the threads and releases the arenas (arrays handed out keep theirs). Idempotent. A program that still
        names the engine fails with an error that says so."""
        native, self._native = self._native, None
        if native is not None:
            native.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_native", None) is not None:
            self.close()

    def stage(self, layer: int, counts: np.ndarray, tokens: np.ndarray, slots: np.ndarray) -> None:
        """Fills a layer's request, as a prefetch does; for probes and tests. Waits for the previous request first.

        Args:
          layer: index of the layer.
          counts: [B, Ko] int32; moves of each head, 0 to C.
          tokens: [B, Ko, C] int32; source token of each move, in [0, S).
          slots: [B, Ko, C] int32; destination slot of each move, in [0, C), distinct within a head.

        Raises:
          ValueError: shapes or values that are not those above.
          TransferError: the previous request was not delivered.
        """
        requests = ("request_counts", "request_tokens", "request_slots")
        arrays = self._arrays(layer, "host_rows", "slot_tokens", *requests)
        S, C = arrays["host_rows"].shape[2], arrays["slot_tokens"].shape[2]
        counts, tokens, slots = np.asarray(counts), np.asarray(tokens), np.asarray(slots)
        for name, array in (("counts", counts), ("tokens", tokens), ("slots", slots)):
            want = arrays[f"request_{name}"].shape
            if array.shape != want:
                raise ValueError(f"{name}: got shape {array.shape}, wanted {want}")
        _within("counts", counts, C + 1)
        used = np.arange(C) < counts[..., None]
        _within("tokens", tokens[used], S)
        _within("slots", slots[used], C)
        self.wait(layer)
        self.write(layer, request_counts=counts, request_tokens=tokens, request_slots=slots)

    def post(self, layer: int) -> int:
        """Hands a layer's request to the transfer threads, and returns its sequence number. Does not wait.

        Raises:
          TransferError: the previous request is not delivered yet.
        """
        native = self._live()
        try:
            return native.post(layer)
        except RuntimeError as error:
            raise TransferError(str(error)) from error

    def wait(self, layer: int) -> None:
        """Returns once the layer's last request is delivered. The GIL is free meanwhile.

        Raises:
          TransferError: not within `timeout_s`, or aborted, or a transfer thread died; names layer, backend, request.
        """
        why = self._live().wait(layer)
        if why:
            raise TransferError(why)

    def drain(self) -> None:
        """Returns once every layer's last request is delivered, so that counts of moved rows are those of posted ones.

        Raises:
          TransferError: as `wait`.
        """
        for layer in range(self._layers):
            self.wait(layer)

    def inject_delay(self, max_us: int, seed: int) -> None:
        """For tests: every chunk of rows is late by a random time up to `max_us` microseconds; 0 ends it."""
        self._live().inject_delay(_integer("max_us", max_us), _integer("seed", seed))

    def inject_thread_death(self, after_chunks: int) -> None:
        """For tests: the thread that takes the chunk after the next `after_chunks` dies of an error."""
        self._live().inject_thread_death(_integer("after_chunks", after_chunks))


def _integer(name: str, value) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: got {value!r}, wanted an integer") from None


def _within(name: str, values: np.ndarray, limit: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= limit):
        raise ValueError(f"{name}: got values {values.min()} to {values.max()}, wanted [0, {limit})")
