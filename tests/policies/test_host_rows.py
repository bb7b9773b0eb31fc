"""Rows in host memory: what is taken, gathered and counted, by hand."""

import gc

import numpy as np
import pytest

from clo_jax.policies import host_rows
from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.host_rows import HostRows, _keepers
from tests.policies import rivals


def layout(**changes):
    model = rivals.LLAMA
    made = RivalLayout.of(model, 2, 16, "float32", **changes)
    return made.with_bytes({"codes": 10}, 16 * made.row_bytes, {"buffer": 7})


def prompt(lay, tokens):
    """Rows [B, K, N, 2, D] of which each is 100 b + 10 head + token."""
    B, K = lay.batch, lay.num_kv_heads
    number = 100 * np.arange(B)[:, None, None] + 10 * np.arange(K)[None, :, None] + np.arange(tokens)[None, None]
    return np.broadcast_to(number[..., None, None], (B, K, tokens, 2, lay.head_dim)).astype(np.float32)


def test_layout_counts_its_own_layers_only():
    lay = layout(full_layers=1)
    assert lay.offloaded(0) == () and lay.offloaded(1) == (0, 1) and lay.resident == ((0, 1), ())
    assert lay.own_heads == 2 * 2 and lay.host_bytes() == 4 * 16 * lay.row_bytes
    assert lay.device_bytes() == {"resident rows": 4 * 16 * lay.row_bytes, "codes": 40, "buffer": 28}
    assert layout().device_bytes() == {"codes": 80, "buffer": 28}  # one buffer, however many layers fill it
    assert layout(full_layers=2).device_bytes() == {"resident rows": 8 * 16 * lay.row_bytes, "codes": 0, "buffer": 0}
    assert lay.row_bytes == 2 * lay.head_dim * 4
    with pytest.raises(ValueError, match="full_layers: got 3, wanted 0 to 2"):
        layout(full_layers=3)


def test_fetch_takes_new_rows_and_gathers_what_is_wanted():
    rows = HostRows(layout())
    rows.on_offload(1, prompt(rows.layout, 8), np.array([8, 5]))
    new = np.full((2, 2, 2, rows.layout.head_dim), 7, np.float32)
    index = np.array([[[0, 8, 3], [7, 8, 1]], [[4, 2, 5], [5, 0, 0]]], np.int32)
    (staged,) = rows.on_fetch(1, index, np.array([3, 1]), np.array([[8, -1], [-1, 5]]), new)
    assert staged[..., 0, 0].tolist() == [[[0, 7, 3], [17, 0, 11]], [[104, 0, 0], [7, 0, 0]]]
    counts = rows.counters()
    assert (counts.rows_offloaded, counts.rows_moved, counts.rows_selected, counts.requests) == (26 + 2, 8, 8, 1)
    assert counts.bytes_moved == 8 * rows.layout.row_bytes and counts.hits == counts.misses == 0
    rows.clear_counters()
    assert rows.counters().rows_moved == 0


@pytest.mark.parametrize("number", [0, 1, 2, 7, 100])
def test_threads_gather_what_one_does(number, monkeypatch):
    monkeypatch.setattr(host_rows, "PART_BYTES", 1)
    monkeypatch.setattr(host_rows, "THREADS", 3)
    rows = HostRows(layout())
    rows.on_offload(0, prompt(rows.layout, 16), np.array([16, 16]))
    row = np.random.default_rng(number).integers(0, 2 * 2 * 16, number)
    out = np.zeros((number, 2, rows.layout.head_dim), np.float32)
    rows.gather(0, row, out)
    want = 100 * (row // 32) + 10 * (row // 16 % 2) + row % 16
    assert (out == want[:, None, None]).all()


def test_rows_go_with_their_owner():
    rows = HostRows(layout())
    handle = rows.handle
    assert handle in _keepers
    del rows
    gc.collect()
    assert handle not in _keepers
