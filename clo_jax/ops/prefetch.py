"""One layer ahead: lookup, selection for the heads that missed, and the request for rows that are not there yet."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import _host
from clo_jax.ops import _check, cache_lookup, select_topk
from clo_jax.ops._registry import register_all


def refresh_slots(tokens, last, count, refreshes, selected, capacity, *, whole):
    """One missed head's slot table after a refresh, in plain numpy: the meaning of the native difference.

    A token that is in a slot stays there. The others, in ascending order, take empty slots first, while fewer than
    `capacity` are filled; then those selected longest ago (of equally old ones the lowest), except the present
    selection's, in ascending order of the slot. With `whole`, or when more than `capacity` slots are filled,
    everything is replaced.

    Args:
      tokens: [C] int32; token in each slot, -1 when empty. last: [C] uint16; refresh that last selected it.
      count: filled slots. refreshes: refreshes so far, modulo 2^16. selected: [n <= capacity] ascending tokens.

    Returns:
      tokens, last, count, refreshes, and the moves as a list of (token, slot).
    """
    tokens, last, count, refreshes = tokens.copy(), last.copy(), int(count), (int(refreshes) + 1) % 2**16
    if whole or count > capacity:
        tokens[:count] = -1
        where, fresh, count = {}, list(selected), 0
    else:
        where = {int(t): j for j, t in enumerate(tokens[:count])}
        fresh = [t for t in selected if int(t) not in where]
    kept = {where[int(t)] for t in selected if int(t) in where}
    last[list(kept)] = refreshes
    free = list(range(count, min(capacity, count + len(fresh))))
    others = sorted(set(range(count)) - kept, key=lambda j: (-((refreshes - int(last[j])) % 2**16), j))
    slots = free + sorted(others[: len(fresh) - len(free)])
    for token, slot in zip(fresh, slots, strict=True):
        tokens[slot], last[slot] = token, refreshes
    moves = [(int(t), s) for t, s in zip(fresh, slots, strict=True)]
    return tokens, last, count + len(free), refreshes, moves


def reference(
    query,
    label,
    age,
    importance,
    thresholds,
    max_age,
    weights,
    mean,
    lse,
    codes,
    factors,
    begin,
    end,
    k,
    capacity,
    slots: dict[str, np.ndarray],
    *,
    retriever,
    refresh,
    k_max,
    scale,
    rows=None,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, np.ndarray], list[Any]]:
    """`prefetch` without an engine, for small shapes and outside jit.

    Args: those of `prefetch`, and instead of an engine
      slots: the layer's slot table: "tokens" [B, Ko, C] int32, "last" [B, Ko, C] uint16, "counts" [B, Ko] int32,
        "refreshes" [B, Ko] uint16.
      rows: [B, Ko, S, 2, D]; the host rows, for retriever "exact".

    Returns:
      label, age, hit as `prefetch` does; the new slot table; moves[b][h], each head's list of (token, slot).
    """
    hit, label, age = cache_lookup.reference(query, label, age, importance, thresholds, max_age)
    nothing = (k == 0)[:, None]
    hit, age = hit | nothing, jnp.where(nothing, -1, age)
    indices = select_topk.reference(
        query,
        weights,
        mean,
        lse,
        codes,
        factors,
        begin,
        end,
        k,
        hit,
        k_max=k_max,
        retriever=retriever,
        scale=scale,
        rows=rows,
    )
    indices, capacity, missed = np.asarray(indices), np.asarray(capacity), ~np.asarray(hit)
    slots = {name: np.array(array) for name, array in slots.items()}
    moves: list[Any] = [[[] for _ in row] for row in missed]
    for b, h in np.argwhere(missed):
        selected = indices[b, h][indices[b, h] >= 0]
        *table, moves[b][h] = refresh_slots(
            *(slots[name][b, h] for name in ("tokens", "last", "counts", "refreshes")),
            selected,
            int(capacity[b]),
            whole=refresh == "whole",
        )
        for name, value in zip(("tokens", "last", "counts", "refreshes"), table, strict=True):
            slots[name][b, h] = value
    return label, age, hit, slots, moves


def prefetch(
    query,
    label,
    age,
    importance,
    thresholds,
    max_age,
    weights,
    mean,
    lse,
    codes,
    factors,
    begin,
    end,
    k,
    capacity,
    layer,
    token,
    *,
    engine,
    retriever,
    refresh,
    k_max,
    scale,
    later=None,
):
    """Decides which heads of a layer keep their rows, selects for the others, and asks the engine for what is missing.

    Does not wait for the rows: `attend` of the same layer does. Waits first if the layer's previous request is still
    under way (only after the first fill at the end of prefill).

    Args:
      query: [B, H, D] float32, bfloat16 or float16, the engine's dtype; guessed query (H = G·Ko heads of offloaded KV
        heads).
      label, age, importance, thresholds, max_age: as in `cache_lookup`.
      weights: [Ko, D, R] float32; hash projections. mean: [B, Ko, D] float32; key means. lse: [B, H] float32;
        log-sum-exp of the last step. codes: [B, Ko, S, R/32] uint32. factors: [B, Ko, S] float16. As in `select_topk`;
        for retriever "exact", which reads the engine's host rows, weights, codes and factors may be of size 0.
      begin, end: [B] int32; candidates are tokens [begin, end), 0 <= begin <= end <= S.
      k: [B] int32; tokens to select, at most k_max and capacity. Fewer candidates than k: all of them. 0: the
        sequence's heads move nothing, are not counted, and get age -1, so that they miss once there is something.
      capacity: [B] int32; slots that each head of the sequence may fill, at most the engine's C.
      layer: [1] int32; index of the layer in the engine.
      token: [1] uint32; orders calls with engine effects. A call whose token goes nowhere is never made.
      engine: handle of the engine (`Engine.handle`), static.
      retriever: "sign", "hata" or "exact", static.
      refresh: static; "delta" moves rows that are not there and evicts the least recently selected, "whole" replaces a
        missed head's whole set.
      k_max: largest k, static.
      scale: of the attention, usually D^-0.5, static.
      later: any array, or None. Comes back as it is, and whatever uses what comes back is computed after this call: XLA
        puts a call whose result nobody wants soon behind everything that needs less memory, and the rows then have no
        time to arrive.

    Returns:
      label [B, H, D]; age [B, Ko] int32; hit [B, Ko] bool; token; later. All but hit are updated in place when their
      arguments are donated.

    Raises:
      ValueError: shapes, dtypes or static arguments that do not agree.
      jax.errors.JaxRuntimeError or ValueError, run time: a closed engine, operands that are not the engine's layer's,
        values out of the ranges above, a failed transfer (`transfer_errors` of clo_jax.transfer.engine tells which).
    """
    _check.dtype("query", query, *_check.ACTIVATION_DTYPES)
    _check.shape("query", query, (None, None, None), "[B, H, D]")
    _check.shape("thresholds", thresholds, (None,), "[Ko]")
    B, H, D = query.shape
    Ko = thresholds.shape[0]
    _check.multiple("query heads", H, "KV heads", Ko)
    _check.shape("weights", weights, (Ko, D, None), "[Ko, D, R]")
    _check.shape("codes", codes, (B, Ko, None, None), "[B, Ko, S, R/32]")
    if retriever not in select_topk.RETRIEVERS:
        raise ValueError(f"retriever: got {retriever!r}, wanted {', '.join(select_topk.RETRIEVERS)}")
    if refresh not in ("delta", "whole"):
        raise ValueError(f"refresh: got {refresh!r}, wanted delta or whole")
    if engine <= 0:
        raise ValueError(f"engine: got {engine}, wanted the handle of an engine")
    if k_max <= 0:
        raise ValueError(f"k_max: got {k_max}, wanted a positive integer")
    if retriever != "exact":
        _check.multiple("hash bits", weights.shape[2], "the bits of a word", 32)
        _check.shape("codes", codes, (B, Ko, None, weights.shape[2] // 32), "[B, Ko, S, R/32]")
        _check.shape("factors", factors, codes.shape[:3], "[B, Ko, S]")
        if H // Ko * weights.shape[2] > 65535:
            raise ValueError(f"G·R: got {H // Ko * weights.shape[2]}, wanted less than 65536, which 16-bit keys hold")
    for name, array, want, letters, dtype in (
        ("label", label, (B, H, D), "[B, H, D]", query.dtype),
        ("age", age, (B, Ko), "[B, Ko]", jnp.int32),
        ("importance", importance, (H,), "[H]", jnp.float32),
        ("thresholds", thresholds, (Ko,), "[Ko]", jnp.float32),
        ("max_age", max_age, (B,), "[B]", jnp.int32),
        ("weights", weights, weights.shape, "[Ko, D, R]", jnp.float32),
        ("mean", mean, (B, Ko, D), "[B, Ko, D]", jnp.float32),
        ("lse", lse, (B, H), "[B, H]", jnp.float32),
        ("codes", codes, codes.shape, "[B, Ko, S, R/32]", jnp.uint32),
        ("factors", factors, factors.shape, "[B, Ko, S]", jnp.float16),
        ("begin", begin, (B,), "[B]", jnp.int32),
        ("end", end, (B,), "[B]", jnp.int32),
        ("k", k, (B,), "[B]", jnp.int32),
        ("capacity", capacity, (B,), "[B]", jnp.int32),
        ("layer", layer, (1,), "[1]", jnp.int32),
        ("token", token, (1,), "[1]", jnp.uint32),
    ):
        _check.shape(name, array, want, letters)
        _check.dtype(name, array, dtype)
    handed = jnp.zeros((1,), jnp.uint32) if later is None else later
    register_all()
    number = select_topk.RETRIEVERS.index(retriever)
    bits = 0 if retriever == "exact" else weights.shape[2]
    workspace = _host.prefetch_workspace(engine=engine, kv_heads=Ko, group=H // Ko, bits=bits, retriever=number)
    call = jax.ffi.ffi_call(
        "clo_prefetch",
        (
            jax.ShapeDtypeStruct(label.shape, label.dtype),
            jax.ShapeDtypeStruct(age.shape, age.dtype),
            jax.ShapeDtypeStruct((B, Ko), jnp.bool_),
            jax.ShapeDtypeStruct((1,), jnp.uint32),
            jax.ShapeDtypeStruct(handed.shape, handed.dtype),
            jax.ShapeDtypeStruct((B, Ko, k_max), jnp.int32),
            jax.ShapeDtypeStruct((workspace,), jnp.uint8),
        ),
        input_output_aliases={1: 0, 2: 1, 16: 3, 17: 4},
    )
    operands = (query, label, age, importance, thresholds, max_age, weights, mean, lse, codes, factors)
    label, age, hit, token, handed, _, _ = call(
        *operands,
        begin,
        end,
        k,
        capacity,
        layer,
        token,
        handed,
        engine=np.int64(engine),
        retriever=np.int64(number),
        whole=refresh == "whole",
        scale=np.float32(scale),
    )
    return label, age, hit, token, None if later is None else handed
