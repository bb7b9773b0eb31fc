"""Settings of the policies that CLO is compared with: frozen dataclasses that check their values, one per system.

`sparsity` is the budget of each: the share of the context whose exact keys and values a decode step attends to. What
counts against it and what comes on top is said in the policy's own module (`clo_jax.policies`).
"""

import dataclasses
from typing import Any, ClassVar

from clo_jax.config import require


def _require_sparsity(value: float) -> None:
    require(0 < value <= 1, "sparsity", value, "a number in (0, 1]")


@dataclasses.dataclass(frozen=True)
class ExactConfig:
    """The true top-k of the exact scores: the upper bound of what selection can do (`policies.exact`)."""

    attention: ClassVar[str] = "exact"
    sparsity: float = 0.1

    def __post_init__(self) -> None:
        _require_sparsity(self.sparsity)


@dataclasses.dataclass(frozen=True)
class InfiniGenConfig:
    """InfiniGen (`policies.infinigen`). Defaults: CLO's comparison; `InfiniGenConfig.original()`: the authors' own."""

    attention: ClassVar[str] = "infinigen"
    sparsity: float = 0.1  # at most this share of the cached tokens is fetched
    partial_ratio: float = 0.25  # share of the channels that the partial keys keep: 32 of 128
    alpha: float | None = None  # fetch what scores above the maximum minus alpha, within the budget; None: all of it
    skew: bool = True  # rotate keys and queries, so that few channels carry much
    full_layers: int = 2  # first layers that stay on the device
    pool_tokens: int | None = None  # rows per head that the host keeps; None: all
    sample_queries: int = 256  # of a prompt, that choose the channels

    def __post_init__(self) -> None:
        _require_sparsity(self.sparsity)
        require(0 < self.partial_ratio <= 1, "partial_ratio", self.partial_ratio, "a number in (0, 1]")
        require(self.alpha is None or self.alpha > 0, "alpha", self.alpha, "a positive number or None")
        require(self.full_layers >= 0, "full_layers", self.full_layers, "an integer >= 0")
        require(
            self.pool_tokens is None or self.pool_tokens >= 1, "pool_tokens", self.pool_tokens,
            "a positive integer or None",
        )  # fmt: skip
        require(self.sample_queries >= 1, "sample_queries", self.sample_queries, "a positive integer")

    @classmethod
    def original(cls, **changes: Any) -> "InfiniGenConfig":
        """The authors' settings for Llama: a fifth of the channels, alpha 5, at most a fifth of the tokens."""
        return cls(**{"sparsity": 0.2, "partial_ratio": 0.2, "alpha": 5.0, **changes})


@dataclasses.dataclass(frozen=True)
class PQCacheConfig:
    """PQCache (`policies.pqcache`). Defaults: the authors' own."""

    attention: ClassVar[str] = "pqcache"
    sparsity: float = 0.1  # share of the tokens beyond the sink that is attended to, recent ones included
    recent_share: float = 0.5  # share of those that are the newest tokens
    sink_tokens: int = 32
    subvectors: int = 2  # of a key
    code_bits: int = 6  # of a sub-vector: 64 centroids
    iterations: int = 20  # of k-means
    cache_tokens: int = 4096  # of the device cache, per layer and sequence; less than a block: no cache
    block_tokens: int = 128
    full_layers: int = 0  # first layers that stay on the device

    def __post_init__(self) -> None:
        _require_sparsity(self.sparsity)
        require(0 <= self.recent_share <= 1, "recent_share", self.recent_share, "a number in [0, 1]")
        require(1 <= self.code_bits <= 8, "code_bits", self.code_bits, "an integer from 1 to 8")
        for name in ("subvectors", "iterations", "block_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a positive integer")
        for name in ("sink_tokens", "cache_tokens", "full_layers"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "an integer >= 0")


@dataclasses.dataclass(frozen=True)
class RetroInferConfig:
    """RetroInfer (`policies.retroinfer`). Defaults: the authors' own, but for the budget, which is that of CLO's
    comparison; `RetroInferConfig.original()` has theirs."""

    attention: ClassVar[str] = "retroinfer"
    sparsity: float = 0.1  # share of the clusters that are retrieved
    estimation: float = 0.232  # share of the clusters that are estimated
    sink_tokens: int = 4
    recent_tokens: int = 64  # last tokens of the prompt that are not indexed
    cluster_tokens: int = 16  # tokens of a cluster, on average
    segment_tokens: int = 8192  # that are clustered on their own
    iterations: int = 10  # of k-means
    page_tokens: int = 8  # rows of a page of the device cache
    cache_ratio: float = 0.0  # share of the clusters that the device caches; 0: three times those that are retrieved
    buffer_clusters: int = 32  # that the execution buffer holds at least
    update_tokens: int = 1024  # generated tokens that enter the index together
    full_layers: int = 0  # first layers that stay on the device

    def __post_init__(self) -> None:
        _require_sparsity(self.sparsity)
        for name in ("estimation", "cache_ratio"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a number in [0, 1]")
        for name in ("recent_tokens", "cluster_tokens", "segment_tokens", "page_tokens", "buffer_clusters"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a positive integer")
        require(self.iterations >= 2, "iterations", self.iterations, "an integer >= 2: within segments, then over all")
        require(
            self.update_tokens >= 1 and self.update_tokens % self.cluster_tokens == 0, "update_tokens",
            self.update_tokens, f"a positive multiple of cluster_tokens = {self.cluster_tokens}",
        )  # fmt: skip
        for name in ("sink_tokens", "full_layers"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "an integer >= 0")

    @classmethod
    def original(cls, **changes: Any) -> "RetroInferConfig":
        """The authors' budget."""
        return cls(**{"sparsity": 0.018, **changes})


RivalConfig = ExactConfig | InfiniGenConfig | PQCacheConfig | RetroInferConfig
RIVALS: dict[str, type[RivalConfig]] = {
    kind.attention: kind for kind in (ExactConfig, InfiniGenConfig, PQCacheConfig, RetroInferConfig)
}


def rival_config(attention: str, given: Any = None) -> RivalConfig | None:
    """The settings of the policy that `attention` names: `given`, or its defaults; None for full attention and CLO.

    Raises:
      ValueError: settings of another policy.
    """
    kind = RIVALS.get(attention)
    if given is not None and (kind is None or not isinstance(given, kind)):
        wanted = "None" if kind is None else kind.__name__
        raise ValueError(f"rival: got {type(given).__name__} with attention {attention}, wanted {wanted}")
    return kind() if given is None and kind is not None else given
