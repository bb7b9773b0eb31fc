"""The clock that takes compilation out of the measured times."""

import time

from clo_jax.session import CompileClock

EVENT = "/jax/core/compile/backend_compile_duration"


def test_a_compilation_inside_another_counts_once(monkeypatch):
    monkeypatch.setattr(CompileClock, "_intervals", [])
    clock = CompileClock()
    start = time.perf_counter()
    time.sleep(0.05)
    CompileClock._listen(EVENT, 0.02)  # a part of the next one
    time.sleep(0.05)
    CompileClock._listen("/jax/other/event", 5.0)
    CompileClock._listen(EVENT, time.perf_counter() - start)
    assert 0.1 <= clock.seconds() <= time.perf_counter() - start
    time.sleep(0.02)
    CompileClock._listen(EVENT, 0.01)
    assert clock.seconds() <= time.perf_counter() - start - 0.005  # what lies between the two is none


def test_what_began_before_the_clock_counts_from_there(monkeypatch):
    monkeypatch.setattr(CompileClock, "_intervals", [])
    CompileClock._listen(EVENT, 3.0)
    clock = CompileClock()
    assert clock.seconds() == 0.0
    time.sleep(0.02)
    CompileClock._listen(EVENT, 7.0)
    assert 0.02 <= clock.seconds() < 1.0
