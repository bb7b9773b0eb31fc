"""Progress, JSON values, byte sizes."""

import dataclasses
import io
import time

import numpy as np
import pytest

from clo_jax.cli import _console


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """terminal() replaces stderr, for the rest of the test, by a terminal whose text can be read."""

    def replace():
        stream = Terminal()
        monkeypatch.setattr("sys.stderr", stream)
        return stream

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(_console, "verbosity", _console.Verbosity())
    return replace


@pytest.mark.parametrize(
    "limit, settings, shown",
    [(0.0, {}, True), (60.0, {}, False), (0.0, {"quiet": True}, False), (0.0, {"progress": False}, False)],
)
def test_progress_is_shown_late_and_never_under_quiet(terminal, monkeypatch, limit, settings, shown):
    monkeypatch.setattr(_console, "SHOW_AFTER_S", limit)
    monkeypatch.setattr(_console, "verbosity", _console.Verbosity(**settings))
    stream = terminal()
    with _console.progress("answering", total=3) as advance:
        advance(1)
        time.sleep(0.3)
    assert ("answering" in stream.getvalue()) is shown


def test_the_bar_that_is_shown_says_how_much_is_pinned(terminal, monkeypatch):
    _console.pinning(1, 2)  # nobody listens
    monkeypatch.setattr(_console, "SHOW_AFTER_S", 0.0)
    stream = terminal()
    with _console.progress("answering", total=3):
        time.sleep(0.2)
        _console.pinning(3 << 29, 3 << 30)
        time.sleep(0.3)
        assert "pinning host memory: 1.50 GiB of 3.00 GiB" in stream.getvalue()
        _console.pinning(3 << 30, 3 << 30)
        time.sleep(0.3)
        assert stream.getvalue().rindex("answering") > stream.getvalue().rindex("pinning")
    _console.pinning(1, 2)


def test_no_progress_without_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(_console, "SHOW_AFTER_S", 0.0)
    with _console.progress("answering"):
        time.sleep(0.1)
    assert stream.getvalue() == ""


def test_no_color_is_honoured(terminal, monkeypatch):
    stream = terminal()
    _console.fail(ValueError("wrong"), 2)
    assert "\x1b[1;31merror: " in stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    stream = terminal()
    _console.fail(ValueError("wrong"), 2)
    assert "31m" not in stream.getvalue() and "wrong" in stream.getvalue()


def test_until_first_yields_everything():
    assert list(_console.until_first(iter([1, 2, 3]), "waiting")) == [1, 2, 3]
    assert list(_console.until_first(iter([]), "waiting")) == []


def test_plain():
    @dataclasses.dataclass
    class Point:
        x: float
        tags: tuple

    value = {"p": Point(float("nan"), ("a", np.int64(3))), 1: np.float32(0.5), "none": None, "yes": np.bool_(True)}
    assert _console.plain(value) == {"p": {"x": None, "tags": ["a", 3]}, "1": 0.5, "none": None, "yes": True}


@pytest.mark.parametrize(
    "n, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 40, "3072.00 GiB"),
    ],
)
def test_human_bytes(n, text):
    assert _console.human_bytes(n) == text
