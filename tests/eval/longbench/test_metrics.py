"""LongBench's metrics: values computed by hand, ROUGE-L and edit similarity against those of the packages `rouge` 1.0.1
and `rapidfuzz` 3.14, words as `jieba` 0.42 cuts them."""

import pytest

from clo_jax.eval.longbench import metrics

# What jieba makes of these texts.
CUT = {
    "北京大学的图书馆非常大。": ["北京大学", "的", "图书馆", "非常", "大", "。"],
    "图书馆在北京大学。": ["图书馆", "在", "北京大学", "。"],
}


def cut(text):
    return CUT[text]


@pytest.mark.parametrize(
    "answer, references, want",
    [
        ("The Mill!", ["a mill"], 1),
        ("the red mill", ["red barn and mill"], 2 * (2 / 2) * (2 / 4) / (2 / 2 + 2 / 4)),
        ("red red", ["red"], 2 * 0.5 * 1 / 1.5),
        ("mill", ["barn", "a Mill."], 1),
        ("", ["barn"], 0),
        ("the", ["the"], 0),  # nothing is left of either
    ],
)
def test_f1(answer, references, want):
    assert metrics.f1(answer, references) == pytest.approx(want)


@pytest.mark.parametrize(
    "answer, reference, want",
    [
        ("the cat sat on the mat", "the cat lay on the mat", 0.7999999950000002),
        (
            "The mill was built. It was tall and old. People came.",
            "It was old. The mill was built by people. The tall people came from far.",
            0.7272727223140496,
        ),
        ("a b c d a b", "b a d c", 0.4999999950000001),
        ("one two. two three. three four", "four three. two one two", 0.749999995),
        ("Same words here.", "Same words here.", 0.999999995),
        ("It ends here. \n", "All ends there. ", 0.4999999950000001),
        ("One.. two", "One. . two", 0.7999999952000001),
        ("a. b.\n\n", "a", 0.4999999962500001),
        ("x", "y", 0),
        ("", "y", 0),
        (" . .", "y", 0),
    ],
)
def test_rouge_l(answer, reference, want):
    assert metrics.rouge_l(answer, ["nothing", reference]) == pytest.approx(want, abs=1e-9)


def test_chinese():
    answer, reference = CUT
    assert metrics.words_zh(answer, cut) == ["北京大学", "的", "图书馆", "非常", "大"]
    # Two words in common of five and three.
    assert metrics.f1_zh(answer, [reference], cut) == pytest.approx(2 * (2 / 5) * (2 / 3) / (2 / 5 + 2 / 3))
    assert metrics.f1_zh(answer, [reference, answer], cut) == 1
    assert metrics.rouge_l_zh(answer, [reference], cut) == pytest.approx(0.39999999520000007, abs=1e-9)


@pytest.mark.parametrize(
    "answer, right, want",
    [
        ("It is about number", "number", 1),
        ("number or date", "number", 0.5),
        ("date", "number", 0),
        ("Individual number", "Individual", 0.5),
        # "number" is part of the right class's name and does not count beside it.
        ("phone number", "phone number", 1),
        ("number", "phone number", 0),
    ],
)
def test_classification(answer, right, want):
    classes = ["number", "date", "Individual", "phone number"]
    assert metrics.classification(answer, [right], classes) == want


@pytest.mark.parametrize("answer, want", [("7", 1), ("7 or 8, or 7", 2 / 3), ("seven", 0), ("17", 0), ("", 0)])
def test_count(answer, want):
    assert metrics.count(answer, ["7"]) == pytest.approx(want)


@pytest.mark.parametrize(
    "answer, right, want",
    [
        ("Paragraph 12", "Paragraph 12", 1),
        ("12 and 3", "Paragraph 12", 0.5),
        ("段落3", "段落3", 1),
        ("段落", "段落3", 0),
    ],
)
def test_retrieval(answer, right, want):
    assert metrics.retrieval(answer, [right]) == want


@pytest.mark.parametrize(
    "answer, reference, want",
    [
        ("return a + b\nmore", "return a - b", 0.92),
        ("\n```python\n# now\nx = foo(bar)", "y = foo(baz, 1)", 0.74),
        ("// all\n# of it", "return", 0),
        ("same", "same", 1),
    ],
)
def test_code_similarity(answer, reference, want):
    assert metrics.code_similarity(answer, [reference]) == want


def test_first_line():
    assert metrics.first_line("\n\nyes\nQuestion: more") == "yes"
