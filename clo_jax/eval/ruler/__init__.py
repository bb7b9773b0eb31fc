"""RULER (Hsieh et al. 2024): 13 synthetic tasks over any length, with its names, structure, metrics and answer lengths;
texts, word lists and wording are our own."""

from clo_jax.eval.metrics import string_match_all, string_match_part
from clo_jax.eval.ruler import frequencies, variables
from clo_jax.eval.ruler.needles import Needles
from clo_jax.eval.ruler.questions import Questions
from clo_jax.eval.samples import GeneratedTask

_NEEDLES = {
    "niah_single_1": Needles("filler"),
    "niah_single_2": Needles("prose"),
    "niah_single_3": Needles("prose", code_values=True),
    "niah_multikey_1": Needles("prose", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", code_keys=True, code_values=True),
    "niah_multivalue": Needles("prose", values=4),
    "niah_multiquery": Needles("prose", keys=4, asked=4),
}
_SQUAD, _HOTPOT = Questions("squad"), Questions("hotpot")

TASKS = {
    task.name: task
    for task in (
        *(GeneratedTask(name, 128, string_match_all, draft) for name, draft in _NEEDLES.items()),
        GeneratedTask("vt", 30, string_match_all, variables.draft),
        GeneratedTask("cwe", 120, string_match_all, frequencies.common_words),
        GeneratedTask("fwe", 50, string_match_all, frequencies.frequent_words),
        GeneratedTask("qa_1", 32, string_match_part, _SQUAD, needs="squad", most=_SQUAD.most),
        GeneratedTask("qa_2", 32, string_match_part, _HOTPOT, needs="hotpot", most=_HOTPOT.most),
    )
}
