"""Configurations: frozen dataclasses that check their values. No I/O, no arrays, no device state."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

Attention = Literal["full", "clo", "exact", "infinigen", "pqcache", "retroinfer"]
Dtype = Literal["float32", "bfloat16", "float16"]  # of parameters, activations and KV rows
Retriever = Literal["sign", "hata", "exact"]
Refresh = Literal["whole", "delta"]
KvDtype = Literal["auto", "int8", "fp8"]  # of offloaded rows; auto: that of activations
GuessFrom = Literal["input", "attention"]  # of the layer before: its input, or that with its attention added


ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)


def require(ok: bool, name: str, got: Any, wanted: str) -> None:
    """Raises a ValueError that names the setting, what came and what was wanted, unless `ok`."""
    if not ok:
        raise ValueError(f"{name}: got {got!r}, wanted {wanted}")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `rope_type`: default, linear, dynamic, llama3 or yarn; `parameters` holds the keys
    that the type reads beyond `theta` (factor, low_freq_factor, beta_fast, ...), as sorted pairs so that it hashes."""

    theta: float
    rope_type: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> Mapping[str, Any]:
        return dict(self.parameters)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder: everything that shapes its parameters or its arithmetic."""

    architecture: Literal["llama", "qwen2"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a positive integer")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads = {self.num_heads}",
        )
        require(self.head_dim > 0 and self.head_dim % 2 == 0, "head_dim", self.head_dim, "a positive even integer")

    @property
    def group(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class CloConfig:
    """The CLO policy. Defaults are ours; `CloConfig.paper()` is the paper's behaviour."""

    sparsity: float = 0.1  # share of the context that a refresh selects: k = ceil(sparsity · length)
    retriever: Retriever = "sign"
    hash_bits: int = 256  # R
    refresh: Refresh = "delta"
    retain: float = 1.5  # c: the buffer of a head holds ceil(c · k) rows
    kv_dtype: KvDtype = "auto"  # int8, fp8: rows in host memory, on the link and selected ones have a byte an element
    guess_from: GuessFrom = "attention"  # "input", the paper's, hides more of a transfer; the guess is worse
    sim_threshold: float = 0.9  # eta, the base cosine threshold (the paper's: 0.8); 1 or more refreshes at every step
    importance_power: float = 3.0  # n
    reuse_margin: float = 0.1  # epsilon of the planner (`cache.plan`); resident_heads is what it results in
    sink_tokens: int = 4
    recent_tokens: int = 64  # at least this many newest tokens are attended exactly
    flush_tokens: int = 64  # block that leaves the tail for the host at once
    refresh_on_flush: bool = True  # every head is refreshed after a flush, so that no token is ever out of reach
    resident_heads: tuple[tuple[int, tuple[int, ...]], ...] | None = None  # ((layer, (heads...)), ...); None: layer 0
    seed: int = 0  # of the untrained hash projections

    def __post_init__(self) -> None:
        require(0 < self.sparsity <= 1, "sparsity", self.sparsity, "a number in (0, 1]")
        require(self.retriever in ("sign", "hata", "exact"), "retriever", self.retriever, "sign, hata or exact")
        require(
            self.hash_bits > 0 and self.hash_bits % 32 == 0, "hash_bits", self.hash_bits, "a positive multiple of 32"
        )
        require(self.refresh in ("whole", "delta"), "refresh", self.refresh, "whole or delta")
        require(self.kv_dtype in KV_DTYPES, "kv_dtype", self.kv_dtype, "auto, int8 or fp8")
        require(
            self.kv_dtype == "auto" or self.retriever != "exact",
            "kv_dtype", self.kv_dtype, "auto with retriever exact, which reads whole keys",
        )  # fmt: skip
        require(self.guess_from in ("input", "attention"), "guess_from", self.guess_from, "input or attention")
        require(math.isfinite(self.retain) and self.retain >= 1, "retain", self.retain, "a number >= 1")
        require(self.refresh == "delta" or self.retain == 1, "retain", self.retain, "1 when refresh is whole")
        require(-1 <= self.sim_threshold <= 2, "sim_threshold", self.sim_threshold, "a number in [-1, 2]")
        require(self.importance_power > 0, "importance_power", self.importance_power, "a positive number")
        require(self.sink_tokens >= 0, "sink_tokens", self.sink_tokens, "an integer >= 0")
        require(self.recent_tokens >= 1, "recent_tokens", self.recent_tokens, "a positive integer")
        require(self.flush_tokens >= 1, "flush_tokens", self.flush_tokens, "a positive integer")

    @classmethod
    def paper(cls, **changes: Any) -> "CloConfig":
        """The paper's behaviour: whole-head refresh, no retained rows, symmetric hash, no refresh on flush, queries
        guessed from the input of the layer before, a base threshold of 0.8."""
        base = dict(
            retriever="hata", refresh="whole", retain=1.0, refresh_on_flush=False, guess_from="input", sim_threshold=0.8
        )
        return cls(**{**base, **changes})
