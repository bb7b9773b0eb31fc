"""Fused head-wise cache lookup and label update (paper Eq. 6 and 10; reference implementation and native call)."""

import jax
import jax.numpy as jnp

from clo_jax.ops import _check
from clo_jax.ops._registry import register_all


def reference(query, label, age, importance, thresholds, max_age):
    """Plain JAX form of `cache_lookup`: same arguments and results."""
    B, H, D = query.shape
    Ko = thresholds.shape[0]
    q, old = query.astype(jnp.float32), label.astype(jnp.float32)
    norms = jnp.linalg.norm(q, axis=-1) * jnp.linalg.norm(old, axis=-1)
    sim = jnp.where(norms > 0, jnp.sum(q * old, axis=-1) / jnp.where(norms > 0, norms, 1.0), 0.0)
    sim, s = sim.reshape(B, Ko, H // Ko), importance.reshape(1, Ko, H // Ko)
    total = s.sum(-1)
    weighted = jnp.where(total > 0, (sim * s).sum(-1) / jnp.where(total > 0, total, 1.0), sim.mean(-1))
    hit = (age >= 0) & (age < max_age[:, None]) & (weighted >= thresholds[None, :])
    label = jnp.where(jnp.repeat(hit, H // Ko, axis=1)[:, :, None], label, query)
    return hit, label, jnp.where(hit, age + 1, 0)


def cache_lookup(query, label, age, importance, thresholds, max_age):
    """Decides for each sequence and KV head whether the rows fetched for an earlier query may be reused.

    Args:
      query: [B, H, D] float32, bfloat16 or float16; guessed query of the layer (H = G·Ko query heads of offloaded KV
        heads).
      label: [B, H, D], dtype of `query`; the query that the head's present set was selected with.
      age: [B, Ko] int32; steps since the last refresh, -1 before the first.
      importance: [H] float32 ≥ 0; weight of each query head in its group (Eq. 10).
      thresholds: [Ko] float32; cosine threshold tau of each KV head (Eq. 9). Above 1: never a hit. -1: always.
      max_age: [B] int32; a head whose age has reached it is refreshed whatever its similarity.

    Returns:
      hit [B, Ko] bool; label [B, H, D], replaced by the query where the head missed; age [B, Ko] int32, one more on a
      hit, 0 on a miss. `label` and `age` are updated in place when their arguments are donated.

    Raises:
      ValueError: shapes or dtypes that do not agree.
    """
    _check.dtype("query", query, *_check.ACTIVATION_DTYPES)
    _check.shape("query", query, (None, None, None), "[B, H, D]")
    _check.shape("thresholds", thresholds, (None,), "[Ko]")
    B, H, D = query.shape
    Ko = thresholds.shape[0]
    _check.multiple("query heads", H, "KV heads", Ko)
    _check.shape("label", label, (B, H, D), "[B, H, D]")
    _check.dtype("label", label, query.dtype)
    _check.shape("age", age, (B, Ko), "[B, Ko]")
    _check.dtype("age", age, jnp.int32)
    _check.shape("importance", importance, (H,), "[H]")
    _check.dtype("importance", importance, jnp.float32)
    _check.dtype("thresholds", thresholds, jnp.float32)
    _check.shape("max_age", max_age, (B,), "[B]")
    _check.dtype("max_age", max_age, jnp.int32)
    register_all()
    call = jax.ffi.ffi_call(
        "clo_cache_lookup",
        (
            jax.ShapeDtypeStruct((B, Ko), jnp.bool_),
            jax.ShapeDtypeStruct(label.shape, label.dtype),
            jax.ShapeDtypeStruct(age.shape, age.dtype),
        ),
        input_output_aliases={1: 1, 2: 2},
    )
    return call(query, label, age, importance, thresholds, max_age)
