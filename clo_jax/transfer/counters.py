"""What the transfer engine counts."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts since the engine was made or `clear_counters` was called. A row is one token's K and V of one head."""

    requests: int  # requests with at least one row to move
    rows_posted: int  # rows that prefetches asked for
    rows_moved: int  # rows that transfers delivered; 0 without kv_offload, where nothing moves
    bytes_moved: int
    rows_offloaded: int  # rows written to the host by prefill and tail flushes
    bytes_offloaded: int
    wait_ns: int  # time that attention spent waiting for rows
    hits: int  # head lookups that reused their set
    misses: int  # head lookups that refreshed it
    rows_selected: int  # k summed over refreshes: what whole-head refreshes would have moved
