"""LongBench's metrics, each of one answer and its accepted answers, in [0, 1]; written from their definitions.

Chinese answers are compared by words; `cut` is what finds them: jieba, where it is installed.
"""

import collections
import re
import string
from collections.abc import Callable, Iterable, Sequence

Cut = Callable[[str], Iterable[str]]

_PUNCTUATION = set(string.punctuation)
_PUNCTUATION_ZH = _PUNCTUATION | set(
    "！？。。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def first_line(answer: str) -> str:
    """What counts of an answer to few-shot prompts, whose examples a model goes on with."""
    return answer.lstrip("\n").split("\n")[0]


def words(text: str) -> list[str]:
    """Small letters, without punctuation and articles."""
    bare = "".join(char for char in text.lower() if char not in _PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def words_zh(text: str, cut: Cut) -> list[str]:
    """Words of a Chinese text, without punctuation and blanks."""
    bare = ("".join(c for c in word.lower() if c not in _PUNCTUATION_ZH and not c.isspace()) for word in cut(text))
    return [word for word in bare if word]


def _f1(found: list[str], wanted: list[str]) -> float:
    same = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def f1(answer: str, references: Sequence[str]) -> float:
    """Of the words that answer and reference share; the best reference counts, here and below."""
    return max(_f1(words(answer), words(reference)) for reference in references)


def f1_zh(answer: str, references: Sequence[str], cut: Cut) -> float:
    return max(_f1(words_zh(answer, cut), words_zh(reference, cut)) for reference in references)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """F of ROUGE-L over sentences, each word once, as the package `rouge` 1.0 has it: the words of the longest common
    subsequences of all pairs of sentences, over the words of each side."""
    return max(_rouge_l(answer, reference) for reference in references)


def rouge_l_zh(answer: str, references: Sequence[str], cut: Cut) -> float:
    return max(_rouge_l(" ".join(cut(answer)), " ".join(cut(reference))) for reference in references)


def _rouge_l(answer: str, reference: str) -> float:
    # Blanks between two full stops, or after the last one, are a sentence of one empty word there.
    found, wanted = ([part.split() or [""] for part in text.split(".") if part] for text in (answer, reference))
    if not found or not wanted:
        return 0.0
    common: set[str] = set()
    for theirs in wanted:
        for ours in found:
            common |= _common_subsequence(theirs, ours)
    precision = len(common) / len({word for part in found for word in part})
    recall = len(common) / len({word for part in wanted for word in part})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _common_subsequence(one: Sequence[str], two: Sequence[str]) -> set[str]:
    """The words of the longest common subsequence; among equally long ones that of `rouge`."""
    table = _lengths(one, two)
    i, j, found = len(one), len(two), set()
    while i and j:
        if one[i - 1] == two[j - 1]:
            i, j = i - 1, j - 1
            found.add(one[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _lengths(one: Sequence[str], two: Sequence[str]) -> list[list[int]]:
    """[i][j]: length of the longest common subsequence of one[:i] and two[:j]."""
    table = [[0] * (len(two) + 1)]
    for a in one:
        before, row = table[-1], [0]
        for j, b in enumerate(two):
            row.append(before[j] + 1 if a == b else max(before[j + 1], row[j]))
        table.append(row)
    return table


def classification(answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """One over the number of classes that the answer names, when the right one is among them. A class whose name is
    part of the right one's does not count as named."""

    def score(right: str) -> float:
        named = [name for name in classes if name in answer and not (name in right and name != right)]
        return 1 / len(named) if right in named else 0.0

    return max(score(reference) for reference in references)


def _share_of_numbers(answer: str, right: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def count(answer: str, references: Sequence[str]) -> float:
    """Share of the answer's numbers that are the right one."""
    return max(_share_of_numbers(answer, reference) for reference in references)


def retrieval(answer: str, references: Sequence[str]) -> float:
    """The same for the number of the right paragraph, as in "Paragraph 12" or "段落12"."""
    return max(_share_of_numbers(answer, re.search(r"(?:Paragraph |段落)(\d+)", ref)[1]) for ref in references)


def code_similarity(answer: str, references: Sequence[str]) -> float:
    """Edit similarity of the first line of code, in whole percent: twice the longest common subsequence over both
    lengths. Lines with a back quote, # or // are no code."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return max(round(100 * _similarity(line, reference)) / 100 for reference in references)


def _similarity(one: str, two: str) -> float:
    return 2 * _lengths(one, two)[-1][-1] / (len(one) + len(two)) if one and two else 0.0
