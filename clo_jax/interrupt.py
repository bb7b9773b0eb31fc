"""Ctrl-C between programs, never inside one: a program that is left running would go on using the engine."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds a KeyboardInterrupt back until the block ends, then raises it. Outside the main thread it does nothing
    (Python delivers signals to the main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending = []
    previous = signal.getsignal(signal.SIGINT)
    if previous is None:  # installed by C code: not ours to replace
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending and callable(previous):
            previous(*pending[-1])
