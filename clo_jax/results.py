"""What a generation returns: text, tokens, why it ended, and what it cost."""

import dataclasses
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Costs of one batch of prompts. Times exclude compilation, which `compile_s` holds. Rows and bytes are those of
    decoding: the first fill at the end of prefill is in `first_fill_rows`. Of a policy that CLO is compared with, hits
    are selected rows that were in its cache on the device, and `rows_moved` what its system would move."""

    attention: str
    ttft_s: float  # prefill and first token
    tpot_s: float | None  # per output token after the first; None when there was only one
    compile_s: float
    device_kv_bytes: int
    host_kv_bytes: int
    device_kv_parts: dict[str, int]
    backend: str | None = None
    retriever: str | None = None  # "hata (untrained)" with random projections, "... (trained)" with a calibration
    head_scores: str | None = None  # "neutral", "given", "measured (gates)" and the like
    planner: str | None = None  # what chose the resident heads; "none": the configuration
    resident_heads: int | None = None  # KV heads whose rows stay on the device, of all layers
    plan_revision: dict[str, Any] | None = None  # with adapt: how often the plan was revised, and what changed last
    refresh: str | None = None
    retain: float | None = None
    guess_from: str | None = None
    kv_dtype: str | None = None  # of offloaded rows: "auto", "int8" or "fp8"
    sparsity: float | None = None
    hit_rate: float | None = None  # head lookups that moved nothing; None before the first lookup
    rows_moved: int = 0  # host to device, by the engine
    bytes_moved: int = 0
    rows_selected: int = 0  # what refreshing whole heads would have moved
    rows_offloaded: int = 0  # device to host: prompt and flushed tail
    first_fill_rows: int = 0
    requests: int = 0
    wait_s: float = 0.0  # attention waiting for rows, summed over layers

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's answer. `token_ids` includes the stop token that ended it; `text` does not."""

    text: str | None  # None without a tokenizer
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    metrics: Metrics

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one chunk added to one row. The last delta of a row carries `finish_reason` and `metrics`."""

    row: int
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None
