import jax
import numpy as np
import pytest

from clo_jax.eval.recall import chains


def drawn(records=7, segments=2, hops=3, seed=0):
    made = chains.draw(jax.random.key(seed), records, segments, hops)
    return np.asarray(made.tokens), np.asarray(made.known)


def test_every_value_is_the_key_of_another_record():
    tokens, _ = drawn(records=50)
    table = tokens[1 : 1 + 50 * chains.RECORD].reshape(50, chains.RECORD)
    assert (table[:, 0] == chains.KEY).all() and (table[:, 3] == chains.VALUE).all()
    keys, values = ({tuple(pair) for pair in table[:, at : at + 2].tolist()} for at in (1, 4))
    assert keys == values and len(keys) == 50
    assert all(tuple(row[1:3]) != tuple(row[4:6]) for row in table.tolist())


def test_known_tokens_follow_from_the_records():
    """A reader who looks up the last key finds every token that is marked as known."""
    tokens, known = drawn(records=9, segments=3, hops=4)
    length = chains.num_tokens(9, 3, 4)
    assert tokens.shape == known.shape == (length,)
    table = tokens[1 : 1 + 9 * chains.RECORD].reshape(9, chains.RECORD)
    links = {tuple(row[1:3].tolist()): row[4:6].tolist() for row in table}
    checked = 0
    for at in np.flatnonzero(known):
        before, following = tokens[: at + 1].tolist(), tokens[at + 1]
        if before[-1] == chains.VALUE:
            wanted = links[tuple(before[-3:-1])][0]
        elif before[-2] == chains.VALUE:
            wanted = links[tuple(before[-4:-2])][1]
        elif before[-3] == chains.VALUE:
            wanted = chains.KEY
        elif before[-1] == chains.KEY:
            wanted = before[-3]
        elif before[-2] == chains.KEY:
            wanted = before[-3]
        else:
            wanted = chains.VALUE
        assert following == wanted
        checked += 1
    assert checked == 3 * (4 * chains.RECORD - 4)


def test_positions_ascend_below_the_limit_and_records_stay_whole():
    length = chains.num_tokens(40, 1, 2)
    positions = np.asarray(chains.spread_positions(jax.random.key(3), 40, length, 100_000, 16))
    steps = np.diff(positions)
    assert positions[0] == 0 and (steps >= 1).all() and positions[-1] < 100_000
    (jumps,) = np.nonzero(steps > 1)
    assert len(jumps) > 5 and (jumps % chains.RECORD == 0).all()


def test_question_and_its_answer():
    asked = chains.question(5, 200, hops=3)
    assert 190 < len(asked.ids) <= 200 and asked.ids[-1] == chains.VALUE
    answer = []
    for number, code in enumerate(asked.values):
        hop = chains.hop(np.int32(code), np.int32(0)).tolist()
        answer += hop[1:3] + ([chains.KEY, *hop[1:3], chains.VALUE] if number < 2 else [])
    assert len(answer) == chains.num_answer_tokens(3)
    assert chains.right(asked, answer) == [True, True, True]
    wrong = answer.copy()
    wrong[6] = chains.FIRST_SYMBOL + (wrong[6] - chains.FIRST_SYMBOL + 1) % chains.SYMBOLS
    assert chains.right(asked, wrong) == [True, False, True]
    assert chains.right(asked, answer[:3]) == [True, False, False]
    assert chains.right(asked, []) == [False, False, False]


@pytest.mark.parametrize("records, segments, hops", [(0, 1, 1), (chains.MOST_RECORDS + 1, 1, 1), (5, 0, 1), (5, 1, 0)])
def test_what_cannot_be_drawn_is_refused(records, segments, hops):
    with pytest.raises(ValueError, match="records, segments, hops: got"):
        chains.draw(jax.random.key(0), records, segments, hops)
