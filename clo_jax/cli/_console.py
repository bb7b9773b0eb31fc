"""What every command prints with: results on stdout, everything else on stderr, one line per error."""

import contextlib
import dataclasses
import itertools
import json
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

SHOW_AFTER_S = 2.0  # work that ends sooner shows no progress


@dataclasses.dataclass
class Verbosity:
    """Set by options of the running command; `main` starts each run from these defaults."""

    quiet: bool = False
    progress: bool = True
    debug: bool = False


verbosity = Verbosity()
_describe: list[Callable[[str], None]] = []  # of the bars that are open: sets the text, or, when empty, the first one


def reset() -> None:
    """Back to the defaults."""
    global verbosity
    verbosity = Verbosity()
    _describe.clear()


def stderr() -> Console:
    """A console on the present sys.stderr (NO_COLOR honoured by rich)."""
    return Console(stderr=True, highlight=False)


def stdout() -> Console:
    """A console on the present sys.stdout, for tables."""
    return Console(highlight=False)


def note(message: str) -> None:
    """One line on stderr, unless --quiet."""
    if not verbosity.quiet:
        stderr().print(Text(message, style="dim"), soft_wrap=True)


def fail(error: BaseException, code: int) -> typer.Exit:
    """Prints the error as one line on stderr (with a traceback under --debug) and returns the exit to raise."""
    if verbosity.debug:
        traceback.print_exception(error, file=sys.stderr)
    text = " ".join(str(error).split()) or type(error).__name__
    stderr().print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)
    return typer.Exit(code)


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr for work that lasts over two seconds; yields advance(n). Shows nothing when stderr is no
    terminal, under --quiet and under --no-progress."""
    console = stderr()
    if verbosity.quiet or not verbosity.progress or not console.is_terminal:
        yield lambda n: None
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total is not None:
        columns[2:2] = [BarColumn(), MofNCompleteColumn()]
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=total)
    lock, ended = threading.Lock(), False
    _describe.append(lambda text: bar.update(task, description=text or what))

    def start() -> None:
        with lock:
            if not ended:
                bar.start()

    timer = threading.Timer(SHOW_AFTER_S, start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda n: bar.advance(task, n)
    finally:
        _describe.pop()
        timer.cancel()
        with lock:
            ended = True
        bar.stop()


def pinning(done: int, total: int) -> None:
    """Says in the progress bar that is shown how much host memory is pinned; once it is all, what the bar said
    before."""
    if _describe:
        _describe[-1]("" if done >= total else f"pinning host memory: {human_bytes(done)} of {human_bytes(total)}")


def until_first(items: Iterator[Any], what: str) -> Iterator[Any]:
    """The same items, with a progress bar until the first of them comes."""
    with progress(what):
        first = list(itertools.islice(items, 1))
    yield from first
    yield from items


def plain(value: Any) -> Any:
    """The value as JSON types: dataclasses to objects, tuples to lists, numpy numbers to numbers, NaN to null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | str | int):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def human_bytes(n: int) -> str:
    """1536 -> "1.50 KiB"."""
    if n < 1024:
        return f"{n} B"
    power = min((n.bit_length() - 1) // 10, 3)
    return f"{n / 1024**power:.2f} {('KiB', 'MiB', 'GiB')[power - 1]}"
