"""PQCache's device cache of whole blocks, as the CPU sees it: which block is where, and which one goes next."""

import numpy as np

from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.staging import CachedRows


class LfuTables:
    """Places of blocks in the caches of several sequences, each of `capacity` blocks. The least frequently used one
    leaves, of several the one that was used longest ago."""

    def __init__(self, sequences: int, capacity: int, num_blocks: int) -> None:
        self.capacity = capacity
        self.place = np.full((sequences, num_blocks), -1, np.int64)  # of each block; -1: not in the cache
        self._times = np.zeros((sequences, num_blocks), np.int64)  # used since it has entered
        self._last = np.zeros((sequences, num_blocks), np.int64)  # when it was used last
        self._clock = 0

    def insert(self, blocks: np.ndarray, count: np.ndarray) -> list[np.ndarray]:
        """Uses blocks in turn, those that are not there enter. blocks [B, n]: the first count[b] different ones of each
        sequence. Returns, for each, the blocks that have entered and stayed, as they entered: a block that is new may
        leave again for the next one."""
        sequence, turn = np.nonzero(np.arange(blocks.shape[1])[None] < count[:, None])
        block = blocks[sequence, turn]
        when, self._clock = self._clock + 1 + turn, self._clock + blocks.shape[1]
        there = self.place[sequence, block] >= 0
        entered = [np.zeros(0, np.int64)] * len(blocks)
        slow = np.zeros(len(blocks), bool)
        slow[sequence[~there]] = True
        # Where all are there nobody leaves, and the turn of one is no matter to another.
        fast = ~slow[sequence]
        self._times[sequence[fast], block[fast]] += 1
        self._last[sequence[fast], block[fast]] = when[fast]
        for b in np.flatnonzero(slow):
            own = sequence == b
            entered[b] = self._insert(b, block[own].tolist(), when[own].tolist())
        return entered

    def _insert(self, b: int, blocks: list[int], when: list[int]) -> np.ndarray:
        """As `insert`, for sequence b: blocks at the times `when`, one by one."""
        place, times, last = self.place[b], self._times[b], self._last[b]
        before = place.copy()
        there = np.flatnonzero(place >= 0)
        uses = zip(times[there].tolist(), last[there].tolist(), strict=True)
        use = dict(zip(there.tolist(), uses, strict=True))
        for block, now in zip(blocks, when, strict=True):
            if block not in use:
                free = len(use)
                if free == self.capacity:
                    victim = min(use, key=use.__getitem__)
                    free, place[victim] = place[victim], -1
                    del use[victim]
                place[block], use[block] = free, (0, 0)
            use[block] = (use[block][0] + 1, now)
        kept = np.array(list(use), np.int64)
        times[kept], last[kept] = np.array(list(use.values()), np.int64).T
        fresh = kept[place[kept] != before[kept]]
        return fresh[np.argsort(last[fresh])]


class BlockRows(CachedRows):
    """Rows in host memory with a cache on the device in blocks of `block` tokens, shared by the KV heads of a layer."""

    def __init__(self, layout: RivalLayout, capacity: int, block: int, buffer: int) -> None:
        """capacity: blocks that the device cache of a layer and sequence holds; buffer: rows that a step selects, of a
        head, at most."""
        cached = capacity * block
        super().__init__(layout, buffer, cached, most_sent(layout, buffer, cached))
        self._capacity, self._block = capacity, block
        self._tables: dict[int, LfuTables] = {}

    def on_offload(self, layer: int, rows: np.ndarray, lengths: np.ndarray) -> tuple[()]:
        num_blocks = -(-self.layout.max_tokens // self._block)
        self._tables[layer] = LfuTables(len(lengths), self._capacity, num_blocks)
        return super().on_offload(layer, rows, lengths)

    def on_look_up(
        self, layer: int, index: np.ndarray, count: np.ndarray, slot: np.ndarray, new: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Takes a new row of each head (as `on_fetch`), finds rows; then the cache takes the blocks that were wanted
        most.

        index [B, K, n]: rows, of which the first count[b] are wanted; end [B]: tokens before it are on the host, only
        whole blocks of them enter the cache. Returns where in the cache each row is, int32 [B, K, n], -1: nowhere; then
        the other rows and those of the blocks that enter, as `_send`.
        """
        self.append(layer, slot, new)
        self.remember(layer, index, count)
        B, K, n = index.shape
        table, lay = self._tables[layer], self.layout
        head = np.arange(B * K).reshape(B, K, 1)
        asked = np.broadcast_to(np.arange(n) < count[:, None, None], index.shape)
        block = index // self._block
        place = table.place[np.arange(B)[:, None, None], block]
        hit = asked & (place >= 0)
        source = np.where(hit, place * self._block + index % self._block, -1).astype(np.int32)
        missed = asked & ~hit
        row, buffer = (head * lay.max_tokens + index)[missed], np.flatnonzero(missed)
        misses, hits = len(row), int(np.count_nonzero(hit))

        entered = table.insert(*self._most_wanted(block, asked, end, table.place.shape[1]))
        sequence, fresh = np.repeat(np.arange(B), [len(x) for x in entered]), np.concatenate(entered)
        of_heads, inside = head[sequence], np.arange(self._block)  # [x, K, 1]; then [x, K, block]
        blocks = of_heads * lay.max_tokens + fresh[:, None, None] * self._block + inside
        first = table.place[sequence, fresh][:, None, None]
        cache = (of_heads * self._capacity + first) * self._block + inside
        nowhere = np.full(blocks.size, -1), np.full(misses, -1)
        moved = misses + blocks.size
        self.count(moved=moved, rows_posted=moved, rows_selected=hits + misses, hits=hits, misses=misses)
        return source, *self._send(
            layer, np.concatenate([row, blocks.ravel()]), np.concatenate([buffer, nowhere[0]]),
            np.concatenate([nowhere[1], cache.ravel()]),
        )  # fmt: skip

    def _most_wanted(
        self, block: np.ndarray, asked: np.ndarray, end: np.ndarray, number: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of `number` blocks the whole ones with selected tokens, those with most first, [B, C], and how many they are
        [B]: at most as many as the cache holds."""
        B = len(end)
        sequence = np.broadcast_to(np.arange(B)[:, None, None], block.shape)
        counts = np.bincount((sequence * number + block)[asked], minlength=B * number).reshape(B, number)
        counts[np.arange(number)[None] >= (end // self._block)[:, None]] = 0
        ranked = np.argsort(-counts, axis=1, kind="stable")[:, : self._capacity]
        return ranked, np.count_nonzero(np.take_along_axis(counts, ranked, axis=1), axis=1)


def most_sent(layout: RivalLayout, buffer: int, cached: int) -> int:
    """Rows of all heads that an access may send at most: all that it selects, and a whole cache."""
    return layout.batch * layout.num_kv_heads * (buffer + cached)
