"""What hash projections are trained for, as differentiable functions of one head's projections W [D, R].

`lost_mass`: the attention mass that a selection by these codes loses, with the sign and the top-k made soft. It is what
the codes are for, and what `clo_jax.calibrate.mass` measures.
`hata_loss`: the objective of HATA (pairs of a query and a key, labelled by the key's exact rank), kept for comparison
and for runs faithful to the paper.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clo_jax.calibrate.mass import LEVELS
from clo_jax.config import Retriever

# Of HATA's repository: weights of the pair, balance and orthogonality terms, and the slope of the soft sign.
HATA_EPS, HATA_LAM, HATA_ETA, HATA_SIGMA = 0.01, 1.0, 2.0, 0.1
HATA_SHARE, HATA_BEST, HATA_WORST = 0.1, 20.0, 1.0
_MASKED = -1e9
_HALVINGS = 20  # of an interval of some ten nats, in search of a threshold


class Batch(NamedTuple):
    """One head's queries [M, G, D] and keys [n, D] of one prompt; `seen` bool [M, n]: the keys before each query;
    `mean` [D] of all the prompt's keys."""

    queries: jax.Array
    keys: jax.Array
    seen: jax.Array
    mean: jax.Array


def soft_sign(x: jax.Array) -> jax.Array:
    """±1 forwards; backwards the slope of tanh, with each column (last axis) at its own spread."""
    spread = jnp.sqrt(jnp.mean(x**2, axis=tuple(range(x.ndim - 1)), keepdims=True)) + 1e-6
    soft = jnp.tanh(x / jax.lax.stop_gradient(spread))
    return soft + jax.lax.stop_gradient(jnp.where(x > 0, 1.0, -1.0) - soft)


def soft_topk(score: jax.Array, seen: jax.Array, k: jax.Array, temperature: float) -> jax.Array:
    """Gates in (0, 1) that add up to k over each row of score [M, n]: a sigmoid around a threshold, for several k at
    once (k [T, M] -> gates [T, M, n]).

    The threshold moves with the scores (implicit differentiation), so that raising all of them changes nothing.
    """
    fixed = jax.lax.stop_gradient(score)

    def gate(score, threshold):
        return jnp.where(seen[None], jax.nn.sigmoid((score[None] - threshold[..., None]) / temperature), 0.0)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        too_many = gate(fixed, middle).sum(axis=2) > k
        return jnp.where(too_many, middle, low), jnp.where(too_many, high, middle)

    low = jnp.broadcast_to(jnp.min(jnp.where(seen, fixed, jnp.inf), axis=1)[None] - 5.0, k.shape)
    high = jnp.broadcast_to(jnp.max(jnp.where(seen, fixed, -jnp.inf), axis=1)[None] + 5.0, k.shape)
    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, (low, high))
    threshold = (low + high) / 2
    gates = gate(fixed, threshold)
    slope = gates * (1 - gates)
    moved = jnp.sum(slope * (score - fixed)[None], axis=2) / jnp.maximum(slope.sum(axis=2), 1e-9)
    return gate(score, threshold + moved)


def exact_logits(batch: Batch) -> jax.Array:
    """[M, G, n]."""
    logits = jnp.einsum("mgd,nd->mgn", batch.queries, batch.keys) * batch.keys.shape[-1] ** -0.5
    return jnp.where(batch.seen[:, None], logits, _MASKED)


def soft_score(retriever: Retriever, weights: jax.Array, batch: Batch, lse: jax.Array) -> jax.Array:
    """The selection's score [M, n], differentiable, in units in which tokens near the top-k boundary differ by tenths:
    nats for `sign`, standard deviations of chance agreement for `hata`. lse [M, G, 1]."""
    M, G, D = batch.queries.shape
    R = weights.shape[1]
    z = jnp.einsum("mgd,dr->mgr", batch.queries, weights)
    if retriever == "hata":
        agreement = jnp.einsum("mgr,nr->mn", soft_sign(z), soft_sign(batch.keys @ weights))
        return agreement * (R * G) ** -0.5
    centred = batch.keys - batch.mean[None]
    p = centred @ weights
    factors = jnp.sum(centred**2, axis=1) / (jnp.sum(jnp.abs(p), axis=1) + 1e-6)
    step = jnp.max(jnp.abs(z), axis=-1, keepdims=True) / LEVELS + 1e-9
    levels = z + jax.lax.stop_gradient(jnp.round(z / step) * step - z)
    dots = jnp.einsum("mgr,nr->mgn", levels, soft_sign(p)) * factors[None, None]
    along_mean = jnp.einsum("mgd,d->mg", batch.queries, batch.mean)[..., None]
    logits = jnp.where(batch.seen[:, None], (dots + along_mean) * D**-0.5, _MASKED)
    return jax.nn.logsumexp(logits - lse, axis=1)


def lost_mass(
    retriever: Retriever, weights: jax.Array, batch: Batch, shares: Sequence[float], temperature: float
) -> jax.Array:
    """Share of the exact top-k's attention mass that the soft selection loses, mean over queries and `shares`."""
    exact = exact_logits(batch)
    lse = jax.nn.logsumexp(exact, axis=-1, keepdims=True)
    p = jnp.mean(jnp.exp(exact - lse), axis=1)
    score = soft_score(retriever, weights, batch, lse)
    upto = jnp.cumsum(-jnp.sort(-p, axis=1), axis=1)
    seen = batch.seen.sum(axis=1).astype(jnp.float32)
    k = jnp.maximum(jnp.array(shares, jnp.float32)[:, None] * seen[None], 1.0)
    best = jnp.take_along_axis(upto, jnp.ceil(k).astype(jnp.int32).T - 1, axis=1).T
    kept = jnp.sum(p[None] * soft_topk(score, batch.seen, k, temperature), axis=2)
    return jnp.mean((best - kept) / best)


def off_orthogonal(weights: jax.Array) -> jax.Array:
    """Frobenius distance to orthonormal columns; for R > D, where there are none, to a tight frame: rows orthogonal
    and columns of mean square 1, W·Wᵀ = (R / D) · I."""
    D, R = weights.shape
    gram = weights.T @ weights if R <= D else weights @ weights.T * (D / R)
    return jnp.sqrt(jnp.sum((gram - jnp.eye(min(D, R), dtype=gram.dtype)) ** 2) + 1e-12)


def hata_loss(weights: jax.Array, batch: Batch) -> jax.Array:
    """HATA's objective: pairs pulled together by the label of the key's rank or pushed apart (label -1), bits balanced,
    projections near orthogonal."""
    M, G, _ = batch.queries.shape
    R = weights.shape[1]
    exact, seen = exact_logits(batch), batch.seen[:, None]
    rank = jnp.argsort(jnp.argsort(-exact, axis=-1), axis=-1).astype(jnp.float32)
    count = jnp.ceil(HATA_SHARE * batch.seen.sum(axis=1).astype(jnp.float32))[:, None, None]
    graded = HATA_BEST - (HATA_BEST - HATA_WORST) * rank / jnp.maximum(count - 1, 1.0)
    label = jnp.where(seen, jnp.where(rank < count, graded, -1.0), 0.0)
    hq = jnp.tanh(HATA_SIGMA / 2 * jnp.einsum("mgd,dr->mgr", batch.queries, weights))  # 2 · sigmoid(x) - 1
    hk = jnp.tanh(HATA_SIGMA / 2 * (batch.keys @ weights))
    squares = jnp.sum(hq**2, axis=-1)[..., None] + jnp.sum(hk**2, axis=-1)[None, None]
    distance = squares - 2 * jnp.einsum("mgr,nr->mgn", hq, hk)
    seen = batch.seen.astype(jnp.float32)
    pairs = jnp.sum(seen) * G
    balance = jnp.einsum("mgr,m->r", hq, seen.sum(axis=1)) + G * jnp.einsum("nr,n->r", hk, seen.sum(axis=0))
    return (
        HATA_EPS * jnp.sum(label * distance) / pairs
        + HATA_LAM * jnp.sum((balance / (pairs * R)) ** 2)
        + HATA_ETA * off_orthogonal(weights)
    )
