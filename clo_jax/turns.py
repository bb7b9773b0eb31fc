"""Callers that take turns."""

import contextlib
import threading
from collections.abc import Iterator

from clo_jax.errors import CloError


class Turns:
    """One caller at a time. The same thread asking again (a stream of its still open) gets an error, not a deadlock."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._owner: int | None = None
        self._ended = False

    @contextlib.contextmanager
    def turn(self, last: bool = False) -> Iterator[None]:
        """One turn. After a `last` one there are only last ones.

        Raises:
          CloError: this thread has the turn already; there are no more.
        """
        if self._owner == threading.get_ident():
            raise CloError("this LLM has an open stream in this thread: close it before the next call")
        with self._busy:
            if self._ended and not last:
                raise CloError("this LLM is closed")
            self._owner, self._ended = threading.get_ident(), last
            try:
                yield
            finally:
                self._owner = None
