"""prefetch: traces of many steps against the plain reference, and what must hold after every one of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.errors import TransferError
from clo_jax.ops import prefetch as op
from clo_jax.ops import select_topk
from clo_jax.transfer.engine import Engine, transfer_errors
from tests.cases import DTYPES
from tests.compare import on_cpu

# A call on a GPU does not see values, and fails later than it is made.
ON_CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="errors of calls on the CPU")
TABLE = ("tokens", "last", "counts", "refreshes")
TABLE_VIEWS = ("slot_tokens", "slot_last", "slot_counts", "refreshes")


def ints(*values):
    return jnp.asarray(values, jnp.int32)


class Layer:
    """One layer's operands and engine. Queries, weights and means are small integers: projections and their signs are
    exact in any order of summation, so that the plain reference selects the same tokens."""

    def __init__(self, seed=0, B=2, Ko=3, G=2, D=64, S=160, R=64, C=64, dtype=jnp.float32, **engine):
        self.random = r = np.random.default_rng(seed)
        self.B, self.Ko, self.H, self.D, self.S, self.R, self.C, self.dtype = B, Ko, Ko * G, D, S, R, C, dtype
        self.engine = Engine([Ko, Ko], B, S, C, D, dtype, **engine)
        self.layer = 1
        self.engine.write(1, host_rows=r.normal(size=(B, Ko, S, 2, D)))
        self.importance = jnp.asarray(r.uniform(size=self.H), jnp.float32)
        self.thresholds = jnp.full((Ko,), 0.75, jnp.float32)
        self.max_age = jnp.full((B,), 5, jnp.int32)
        self.weights = jnp.asarray(r.integers(-3, 4, size=(Ko, D, R)), jnp.float32)
        self.mean = jnp.asarray(r.integers(-1, 2, size=(B, Ko, D)), jnp.float32)
        self.lse = jnp.zeros((B, self.H), jnp.float32)
        self.codes = jnp.asarray(r.integers(0, 2**32, size=(B, Ko, S, R // 32), dtype=np.uint32))
        self.factors = jnp.asarray(r.uniform(0.01, 0.02, size=(B, Ko, S)), jnp.float16)
        self.label = jnp.zeros((B, self.H, D), dtype)
        self.age = jnp.full((B, Ko), -1, jnp.int32)
        self.token = jnp.zeros((1,), jnp.uint32)
        self.direction = r.integers(-3, 4, size=(B, self.H, D))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def next_query(self):
        """The last one with a tenth of its entries changed, or half of them for some heads: hits and misses occur."""
        r = self.random
        share = np.where(r.uniform(size=(self.B, self.H, 1)) < 0.3, 0.5, 0.1)
        fresh = r.uniform(size=self.direction.shape) < share
        self.direction = np.where(fresh, r.integers(-3, 4, size=fresh.shape), self.direction)
        return jnp.asarray(self.direction, self.dtype)

    def table(self):
        views = (getattr(self.engine, view)(self.layer).copy() for view in TABLE_VIEWS)
        return dict(zip(TABLE, views, strict=True))

    def arguments(self, query, begin, end, k, capacity):
        lookup = (query, self.label, self.age, self.importance, self.thresholds, self.max_age)
        return *lookup, self.weights, self.mean, self.lse, self.codes, self.factors, begin, end, k, capacity

    def prefetch(self, args, *, retriever="hata", refresh="delta", k_max=32):
        self.label, self.age, hit, self.token, _ = op.prefetch(
            *args,
            ints(self.layer),
            self.token,
            engine=self.engine.handle,
            retriever=retriever,
            refresh=refresh,
            k_max=k_max,
            scale=self.D**-0.5,
        )
        return np.asarray(hit)

    def reference(self, args, *, retriever="hata", refresh="delta", k_max=32):
        static = dict(retriever=retriever, refresh=refresh, k_max=k_max, scale=self.D**-0.5)
        rows = jnp.asarray(self.engine.host_rows(self.layer)) if retriever == "exact" else None
        return on_cpu(op.reference)(*args, self.table(), **static, rows=rows)

    def select(self, args, hit, *, retriever="hata", k_max=32):
        query, begin, end, k = args[0], *args[11:14]
        static = dict(retriever=retriever, k_max=k_max, scale=self.D**-0.5)
        rows = jnp.asarray(self.engine.host_rows(self.layer)) if retriever == "exact" else None
        return np.asarray(
            select_topk.select_topk(
                query,
                self.weights,
                self.mean,
                self.lse,
                self.codes,
                self.factors,
                begin,
                end,
                k,
                hit,
                rows=rows,
                **static,
            )
        )

    def assert_buffer_holds_what_the_table_says(self):
        """Bit for bit: every slot's row is its token's host row; slots are a prefix of distinct tokens."""
        table = self.table()
        filled = np.arange(self.C) < table["counts"][..., None]
        np.testing.assert_array_equal(table["tokens"] >= 0, filled)
        rows, host = (np.asarray(r).view(np.uint8) for r in (self.engine.selected_rows(1), self.engine.host_rows(1)))
        for b, h in np.ndindex(self.B, self.Ko):
            tokens = table["tokens"][b, h][filled[b, h]]
            assert len(set(tokens)) == len(tokens)
            np.testing.assert_array_equal(rows[b, h, : len(tokens)], host[b, h, tokens])


def sizes(length, retain, C, share=0.15):
    """k and capacity of sequences of these lengths."""
    k = [max(1, math.ceil(share * n)) for n in length]
    return ints(*k), ints(*(min(C, math.ceil(retain * n)) for n in k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("refresh, retain", [("whole", 1), ("delta", 1), ("delta", 1.5), ("delta", 2), ("delta", 3)])
def test_traces_match_the_reference(refresh, retain, dtype):
    with Layer(seed=int(10 * retain), dtype=dtype, threads=2) as x:
        x.engine.inject_delay(300, seed=1)
        hits = misses = selected = moved = new_rows = 0
        for step in range(24):
            length = (40 + 4 * step, 12 + step)  # ragged, growing
            k, capacity = sizes(length, retain, x.C)
            args = x.arguments(x.next_query(), ints(4, 2), ints(*length), k, capacity)
            label_before = np.asarray(x.label)
            label, age, hit, slots, moves = x.reference(args, refresh=refresh)
            got = x.prefetch(args, refresh=refresh)
            np.testing.assert_array_equal(got, np.asarray(hit))
            np.testing.assert_array_equal(np.asarray(x.label), np.asarray(label))
            np.testing.assert_array_equal(np.asarray(x.age), np.asarray(age))
            table = x.table()
            for name in TABLE:
                np.testing.assert_array_equal(table[name], slots[name], err_msg=name)
            counts, tokens, to = x.engine.request(x.layer)
            for b, h in np.ndindex(*got.shape):
                request = list(zip(tokens[b, h, : counts[b, h]], to[b, h, : counts[b, h]], strict=True))
                assert request == moves[b][h]
                changed = (label_before.reshape(2, 3, -1)[b, h] != np.asarray(x.label).reshape(2, 3, -1)[b, h]).any()
                assert changed == (not got[b, h])
            x.engine.wait(x.layer)
            x.assert_buffer_holds_what_the_table_says()
            chosen = x.select(args, jnp.asarray(got))
            for b, h in np.argwhere(~got):
                want = chosen[b, h][chosen[b, h] >= 0]
                assert len(want) == int(k[b]) and set(want) <= set(table["tokens"][b, h])
                selected += len(want)
            assert (table["counts"] <= np.asarray(capacity)[:, None]).all()
            hits, misses = hits + int(got.sum()), misses + int((~got).sum())
            moved += int(counts.sum())
            c = x.engine.counters()
            assert (c.hits, c.misses, c.rows_selected) == (hits, misses, selected)
            assert c.rows_posted == c.rows_moved == moved
            assert c.bytes_moved == moved * 2 * x.D * jnp.dtype(dtype).itemsize
            new_rows += sum(len(m) for row in moves for m in row)
        assert hits > 10 and misses > 10 and moved == new_rows
        assert moved == selected if refresh == "whole" else 0 < moved < selected


@pytest.mark.parametrize("retriever", ["sign", "exact"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_retrievers_move_what_select_topk_selects(retriever, dtype):
    with Layer(seed=3, dtype=dtype) as x:
        for step in range(8):
            args = x.arguments(x.next_query(), ints(4, 4), ints(60 + step, 150), ints(9, 20), ints(12, 30))
            before = x.table()
            hit = x.prefetch(args, retriever=retriever)
            selected = x.select(args, jnp.asarray(hit), retriever=retriever)
            after = x.table()
            for b, h in np.argwhere(~hit):
                chosen = selected[b, h][selected[b, h] >= 0]
                want = op.refresh_slots(*(before[n][b, h] for n in TABLE), chosen, int(args[14][b]), whole=False)
                for name, value in zip(TABLE, want, strict=False):
                    np.testing.assert_array_equal(after[name][b, h], value, err_msg=name)
            x.engine.wait(x.layer)
            x.assert_buffer_holds_what_the_table_says()


def test_exact_needs_no_codes():
    with Layer(seed=4) as x:
        args = list(x.arguments(x.next_query(), ints(0, 0), ints(100, 100), ints(8, 8), ints(8, 8)))
        want = x.select(args, jnp.zeros((2, 3), bool), retriever="exact")
        args[6], args[9], args[10] = x.weights[..., :0], x.codes[:, :, :0, :0], x.factors[..., :0]
        x.prefetch(args, retriever="exact")
        np.testing.assert_array_equal(np.sort(x.table()["tokens"][..., :8]), want[..., :8])


def test_eviction_order_on_random_tables_and_across_the_turn_of_the_counter():
    with Layer(seed=5, B=4, Ko=4, C=24, threads=1) as x:
        x.thresholds = jnp.full((4,), 2.0, jnp.float32)
        for seed in range(30):
            r = np.random.default_rng(seed)
            capacity = r.integers(8, 25, size=4)
            k = np.minimum(r.integers(0, 20, size=4), capacity)
            tokens, last, counts, refreshes = (getattr(x.engine, view)(1) for view in TABLE_VIEWS)
            for b, h in np.ndindex(4, 4):
                n = r.integers(0, 25)  # now and then more than the capacity: everything is replaced
                counts[b, h], refreshes[b, h] = n, r.choice([0, 3, 30000, 65534, 65535])
                tokens[b, h] = np.where(np.arange(24) < n, r.permutation(x.S)[:24], -1)
                last[b, h] = refreshes[b, h] - r.integers(0, 6, size=24).astype(np.uint16)
            x.engine.write(1, slot_tokens=tokens, slot_last=last, slot_counts=counts, refreshes=refreshes)
            args = x.arguments(x.next_query(), ints(0, 0, 9, 0), ints(160, 60, 80, 0), ints(*k), ints(*capacity))
            *_, slots, _ = x.reference(args)
            np.testing.assert_array_equal(x.prefetch(args), np.tile(k[:, None] == 0, 4))
            for name in TABLE:
                np.testing.assert_array_equal(x.table()[name], slots[name], err_msg=f"{name}, seed {seed}")


def test_the_least_recently_selected_leave_first():
    table = (np.array([10, 11, 12, 13, -1], np.int32), np.array([7, 5, 5, 6, 0], np.uint16), 4, 7)
    tokens, last, count, refreshes, moves = op.refresh_slots(*table, [12, 20, 21, 22], 5, whole=False)
    # 20 takes the empty slot; then slot 1 (refresh 5) and slot 3 (refresh 6) leave. Slot 2 is as old as 1 but selected.
    assert moves == [(20, 4), (21, 1), (22, 3)]
    assert list(tokens) == [10, 21, 12, 22, 20] and list(last) == [7, 8, 8, 8, 8] and (count, refreshes) == (5, 8)


def test_a_fill_followed_at_once_by_another_prefetch():
    with Layer(seed=6, threads=1) as x:
        x.engine.inject_delay(20000, seed=6)
        x.thresholds = jnp.full((3,), 2.0, jnp.float32)
        for _ in range(5):
            x.prefetch(x.arguments(x.next_query(), ints(0, 0), ints(160, 160), ints(20, 20), ints(24, 24)))
        x.engine.wait(x.layer)
        x.assert_buffer_holds_what_the_table_says()
        assert x.engine.counters().requests == 5


def test_nothing_to_select_posts_nothing_and_misses_next_time():
    with Layer(seed=7) as x:
        x.thresholds = jnp.full((3,), -1.0, jnp.float32)  # whoever has a set reuses it
        query = x.next_query()
        hit = x.prefetch(x.arguments(query, ints(4, 4), ints(4, 160), ints(0, 8), ints(5, 8)))
        np.testing.assert_array_equal(hit, [[True] * 3, [False] * 3])
        np.testing.assert_array_equal(np.asarray(x.age), [[-1] * 3, [0] * 3])
        x.engine.wait(x.layer)
        c = x.engine.counters()
        assert (c.requests, c.hits, c.misses, c.rows_selected, c.rows_moved) == (1, 0, 3, 24, 24)
        assert not x.engine.slot_counts(x.layer)[0].any() and not x.engine.refreshes(x.layer)[0].any()
        hit = x.prefetch(x.arguments(query, ints(4, 4), ints(14, 160), ints(5, 8), ints(5, 8)))
        np.testing.assert_array_equal(hit, [[False] * 3, [True] * 3])
        assert (x.engine.slot_counts(x.layer) == [[5] * 3, [8] * 3]).all()


def test_no_candidates_for_a_positive_k_is_a_miss_that_moves_nothing():
    with Layer(seed=7) as x:
        hit = x.prefetch(x.arguments(x.next_query(), ints(4, 4), ints(4, 4), ints(5, 5), ints(5, 5)))
        assert not hit.any() and x.engine.counters().misses == 6
        x.engine.wait(x.layer)
        assert x.engine.counters().requests == 0 and not x.engine.slot_counts(x.layer).any()


def test_hits_leave_table_and_buffer_alone():
    with Layer(seed=8) as x:
        query = x.next_query()
        args = (ints(4, 4), ints(100, 50), ints(10, 5), ints(15, 7))
        x.prefetch(x.arguments(query, *args))
        x.engine.wait(x.layer)
        before, rows = x.table(), x.engine.selected_rows(1).copy()
        assert x.prefetch(x.arguments(query, *args)).all()
        for name in TABLE:
            np.testing.assert_array_equal(x.table()[name], before[name])
        np.testing.assert_array_equal(x.engine.selected_rows(1), rows)
        assert x.engine.counters().requests == 1 and x.engine.counters().hits == 6


def test_offload_and_no_offload_keep_the_same_table():
    with Layer(seed=9) as moving, Layer(seed=9, kv_offload=False) as still:
        for step in range(6):
            for x in (moving, still):
                x.prefetch(x.arguments(x.next_query(), ints(4, 4), ints(100 + step, 150), ints(12, 20), ints(16, 24)))
            for name in TABLE:
                np.testing.assert_array_equal(moving.table()[name], still.table()[name])
        counted = [x.engine.counters() for x in (moving, still)]
        assert counted[0].rows_posted == counted[1].rows_posted > 0 and counted[1].rows_moved == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_hands_through_what_is_to_come_later(dtype):
    with Layer() as x:
        later = jnp.arange(12, dtype=dtype).reshape(3, 4)
        args = x.arguments(x.next_query(), ints(4, 4), ints(90, 150), ints(9, 20), ints(12, 25))
        call = dict(engine=x.engine.handle, retriever="hata", refresh="delta", k_max=32, scale=0.125)
        *_, handed = jax.jit(lambda later, *a: op.prefetch(*a, later=later, **call))(
            later, *args, ints(x.layer), x.token
        )
        assert handed.dtype == dtype
        np.testing.assert_array_equal(np.asarray(handed), np.asarray(later))
        *_, nothing = op.prefetch(*args, ints(x.layer), x.token, **call)
        assert nothing is None


def test_in_a_jitted_loop_with_donated_state():
    def steps(x, queries, label, age, token):
        def body(i, state):
            label, age, token = state
            args = (x.importance, x.thresholds, x.max_age, x.weights, x.mean, x.lse, x.codes, x.factors)
            call = dict(engine=x.engine.handle, retriever="hata", refresh="delta", k_max=32, scale=0.125)
            begin, end, k, capacity = ints(4, 4), ints(90, 150), ints(9, 20), ints(12, 25)
            label, age, _, token, _ = op.prefetch(
                queries[i], label, age, *args, begin, end, k, capacity, ints(1), token, **call
            )
            return label, age, token

        return jax.lax.fori_loop(0, 10, body, (label, age, token))

    with Layer(seed=10) as looped, Layer(seed=10) as single:
        queries = jnp.stack([looped.next_query() for _ in range(10)])
        state = (looped.label, looped.age, looped.token)
        label, age, _ = jax.jit(lambda q, *s: steps(looped, q, *s), donate_argnums=(1, 2, 3))(queries, *state)
        for query in queries:
            single.prefetch(single.arguments(query, ints(4, 4), ints(90, 150), ints(9, 20), ints(12, 25)))
        np.testing.assert_array_equal(np.asarray(label), np.asarray(single.label))
        np.testing.assert_array_equal(np.asarray(age), np.asarray(single.age))
        for name in TABLE:
            np.testing.assert_array_equal(looped.table()[name], single.table()[name])
        looped.engine.wait(1)
        looped.assert_buffer_holds_what_the_table_says()
        assert all(a.is_deleted() for a in state)


@ON_CPU
def test_a_failed_transfer_is_the_next_prefetch_error():
    with Layer(seed=11, threads=1) as x:
        args = (ints(0, 0), ints(160, 160), ints(20, 20), ints(24, 24))
        x.engine.inject_thread_death(0)
        x.prefetch(x.arguments(x.next_query(), *args))
        with pytest.raises(TransferError, match="^layer 1, backend host, request 1: transfer t"), transfer_errors():
            x.prefetch(x.arguments(x.next_query(), *args))
        assert x.engine.counters().misses == 6  # of the first call alone


@ON_CPU
@pytest.mark.parametrize(
    "end, k, capacity, message",
    [
        (160, 20, 19, "sequence 1: k 20, wanted at most k_max 32 and capacity 19"),
        (160, 33, 40, "sequence 1: k 33, wanted at most k_max 32 and capacity 40"),
        (160, -1, 40, "sequence 1: k -1"),
        (160, 8, 65, "sequence 1: capacity 65, the engine's slots 64"),
        (161, 8, 8, "sequence 1: candidates from 4 to 161, context capacity 160"),
        (3, 8, 8, "sequence 1: candidates from 4 to 3"),
    ],
)
def test_values_out_of_range_change_nothing(end, k, capacity, message):
    with Layer(seed=12) as x:
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
            x.prefetch(x.arguments(x.next_query(), ints(4, 4), ints(100, end), ints(8, k), ints(8, capacity)))
        assert not x.table()["refreshes"].any() and x.engine.counters().misses == 0


@pytest.mark.parametrize(
    "position, bad, message",
    [
        (0, lambda a: a[0], r"query: got shape \(6, 64\), wanted \[B, H, D\]"),
        (1, lambda a: a.astype(jnp.bfloat16), "label: got dtype bfloat16, wanted float32"),
        (6, lambda a: a[..., :33], "hash bits: got 33, wanted a positive multiple of the bits of a word = 32"),
        (7, lambda a: a[:1], r"mean: got shape \(1, 3, 64\)"),
        (8, lambda a: a[:, :2], r"lse: got shape \(2, 2\), wanted \[B, H\] = \[2, 6\]"),
        (9, lambda a: a[..., :1], r"codes: got shape .* = \[2, 3, any, 2\]"),
        (10, lambda a: a.astype(jnp.float32), "factors: got dtype float32, wanted float16"),
        (11, lambda a: a[:1], r"begin: got shape \(1,\)"),
        (14, lambda a: a.astype(jnp.float32), "capacity: got dtype float32, wanted int32"),
    ],
)
def test_bad_arguments_are_named(position, bad, message):
    with Layer(seed=13) as x:
        args = list(x.arguments(x.next_query(), ints(4, 4), ints(100, 100), ints(8, 8), ints(8, 8)))
        args[position] = bad(args[position])
        with pytest.raises(ValueError, match=message):
            x.prefetch(args)


@pytest.mark.parametrize(
    "static, message",
    [
        (dict(retriever="best"), "retriever: got 'best', wanted sign, hata, exact"),
        (dict(refresh="some"), "refresh: got 'some', wanted delta or whole"),
        (dict(k_max=0), "k_max: got 0, wanted a positive integer"),
    ],
)
def test_bad_static_arguments_are_named(static, message):
    with Layer(seed=14) as x:
        with pytest.raises(ValueError, match=message):
            x.prefetch(x.arguments(x.next_query(), ints(4, 4), ints(99, 99), ints(8, 8), ints(8, 8)), **static)
