"""Ctrl-C between programs, never inside one: a program that is left running would go on using the engine."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Holds a KeyboardInterrupt back until the block ends, then raises it; the block gets a function that raises it
    earlier, where that is safe. Outside the main thread it does nothing (Python delivers signals to the main thread
    only)."""
    pending = []
    previous = signal.getsignal(signal.SIGINT)
    # Not the main thread's, or a handler that C code installed: not ours to replace.
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield lambda: None
        return

    def raise_pending() -> None:
        if pending and callable(previous):
            previous(*pending.pop())

    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield raise_pending
    finally:
        signal.signal(signal.SIGINT, previous)
        raise_pending()
