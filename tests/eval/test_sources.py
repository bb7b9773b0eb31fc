"""Reading what the user gives: text, SQuAD, HotpotQA."""

import json
import random

import pytest

from clo_jax.eval.sources import Sources

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "Ada built the mill.",
                    "qas": [
                        {"question": "Who built the mill?", "answers": [{"text": "Ada"}, {"text": "Ada"}]},
                        {"question": "Who burnt it?", "answers": [], "is_impossible": True},
                    ],
                },
                {"context": "The mill is tall.", "qas": []},
            ]
        },
        {"paragraphs": [{"context": "Cats sleep.", "qas": [{"question": "Who?", "answers": [{"text": "Cats"}]}]}]},
    ]
}
HOTPOT = [
    {
        "question": "Which is older?",
        "answer": "Mill",
        "supporting_facts": [["Mill", 0], ["Barn", 0]],
        "context": [["Barn", ["New.", " Red."]], ["Road", ["Long."]], ["Mill", ["Old."]]],
    },
    {
        "question": "And?",
        "answer": "Road",
        "supporting_facts": [["Road", 0]],
        "context": [["Road", ["Long."]], ["Sea", ["Wide."]]],
    },
]


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_squad(tmp_path):
    found = Sources.read(squad=write(tmp_path / "squad.json", SQUAD)).squad
    assert found.documents == ("Ada built the mill.", "The mill is tall.", "Cats sleep.")
    assert [(q.text, q.answers, q.gold, q.related) for q in found.questions] == [
        ("Who built the mill?", ("Ada",), (0,), (1,)),
        ("Who?", ("Cats",), (2,), ()),
    ]


def test_hotpot(tmp_path):
    found = Sources.read(hotpot=write(tmp_path / "hotpot.json", HOTPOT)).hotpot
    assert found.documents == ("Barn\nNew. Red.", "Road\nLong.", "Mill\nOld.", "Sea\nWide.")
    assert [(q.answers, q.gold, q.related) for q in found.questions] == [
        (("Mill",), (0, 2), (1,)),
        (("Road",), (1,), (3,)),
    ]


def test_text_in_sentences_from_anywhere_and_again(tmp_path):
    sources = Sources.read(text=write(tmp_path / "text.txt", "One goes.\nTwo goes\non! Three?  Four"))
    assert sources.text == ("One goes.", "Two goes on!", "Three?", "Four")
    taken = sources.sentences(random.Random(0), 6)
    start = sources.text.index(taken[0])
    assert taken == [sources.text[(start + i) % 4] for i in range(6)]
    assert len({sources.sentences(random.Random(seed), 1)[0] for seed in range(40)}) == 4


def test_digests_tell_sources_apart(tmp_path):
    one = Sources.read(text=write(tmp_path / "one.txt", "One."), squad=write(tmp_path / "squad.json", SQUAD))
    two = Sources.read(text=write(tmp_path / "two.txt", "Two."))
    assert len({one.digest(None), two.digest(None), Sources().digest(None), one.digest("squad")}) == 4
    assert Sources().describe() == {"text": "generated", "squad": None, "hotpot": None}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("text", "  \n ", "got no sentence, wanted text"),
        ("squad", "{", "not SQuAD's JSON"),
        ("squad", {"data": [{"paragraphs": [{"qas": []}]}]}, "not SQuAD's JSON: KeyError 'context'"),
        ("squad", {"data": []}, "got no answerable question"),
        ("hotpot", {"data": []}, "not HotpotQA's JSON"),
        ("hotpot", [], "got no answerable question"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    path = write(tmp_path / f"{name}.file", content)
    with pytest.raises(ValueError, match=message) as error:
        Sources.read(**{name: path})
    assert str(path) in str(error.value)
