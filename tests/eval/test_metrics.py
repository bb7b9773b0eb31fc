"""Metrics on values computed by hand."""

import pytest

from clo_jax.eval import metrics


@pytest.mark.parametrize(
    "answer, references, every, part",
    [
        ("The numbers are 12, 34 and 56.", ["12", "34", "56"], 1.0, 1.0),
        ("12 and 56", ["12", "34", "56"], 2 / 3, 1.0),
        ("NEW york", ["New York", "Boston"], 0.5, 1.0),
        ("nothing", ["12", "34"], 0.0, 0.0),
        ("", ["12"], 0.0, 0.0),
        ("1234", ["12", "34", "56", "78"], 0.5, 1.0),  # substrings count, as in the original
    ],
)
def test_string_matches(answer, references, every, part):
    assert metrics.string_match_all(answer, references) == pytest.approx(every)
    assert metrics.string_match_part(answer, references) == part


def test_clean():
    assert metrics.clean(" \x00one\ttwo\x1f ") == "one\ntwo"
    assert metrics.clean("\x03\n ") == ""
