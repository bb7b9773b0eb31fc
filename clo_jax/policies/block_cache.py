"""PQCache's device cache of whole blocks, as the CPU sees it: which block is where, and which one goes next."""

import numpy as np

from clo_jax.policies.host_rows import HostRows


class LfuTable:
    """Places of blocks in a cache of `capacity` blocks. The least frequently used one leaves, of several the one that
    was used longest ago."""

    def __init__(self, capacity: int, num_blocks: int) -> None:
        self.capacity = capacity
        self.place = np.full(num_blocks, -1, np.int32)  # of each block; -1: not in the cache
        self._use: dict[int, list[int]] = {}  # block -> [times used, when last]
        self._clock = 0

    def insert(self, blocks) -> list[int]:
        """Uses blocks in turn, those that are not there enter. Returns the blocks that have entered and stayed: a block
        that is new may leave again for the next one."""
        before = self.place.copy()
        for block in map(int, blocks):
            self._clock += 1
            if block not in self._use:
                if len(self._use) < self.capacity:
                    place = len(self._use)
                else:
                    victim = min(self._use, key=self._use.__getitem__)
                    place = self.place[victim]
                    self.place[victim] = -1
                    del self._use[victim]
                self.place[block] = place
                self._use[block] = [0, 0]
            self._use[block][0] += 1
            self._use[block][1] = self._clock
        return [block for block in self._use if self.place[block] != before[block]]


class BlockRows(HostRows):
    """Rows in host memory with a cache on the device in blocks of `block` tokens, shared by the KV heads of a layer."""

    def __init__(self, layout, capacity: int, block: int) -> None:
        """capacity: blocks that the device cache of a layer and sequence holds."""
        super().__init__(layout)
        self._capacity, self._block = capacity, block
        self._tables: dict[int, list[LfuTable]] = {}

    def on_offload(self, layer: int, rows: np.ndarray, lengths: np.ndarray) -> tuple[()]:
        num_blocks = -(-self.layout.max_tokens // self._block)
        self._tables[layer] = [LfuTable(self._capacity, num_blocks) for _ in lengths]
        return super().on_offload(layer, rows, lengths)

    def on_look_up(
        self, layer: int, index: np.ndarray, count: np.ndarray, slot: np.ndarray, new: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """As `on_fetch`, for rows that are not in the cache; then the cache takes the blocks that were wanted most.

        end [B]: tokens before it are on the host; only whole blocks of them enter the cache.
        Returns where in the cache each row is, int32 [B, K, n], -1: nowhere; the others' rows [B, K, n, 2, D];
        the places of the blocks that enter, int32 [B, C], -1: none, and their rows [B, C, K, block, 2, D].
        """
        self.append(layer, slot, new)
        self.remember(layer, index, count)
        B, K, n = index.shape
        tail = (2, self.layout.head_dim)
        source = np.full((B, K, n), -1, np.int32)
        staging = np.zeros((B, K, n, *tail), new.dtype)
        entering = np.full((B, self._capacity), -1, np.int32)
        blocks = np.zeros((B, self._capacity, K, self._block, *tail), new.dtype)
        hits = misses = entered = 0
        for b in range(B):
            rows, table, wanted = self._rows[layer][b], self._tables[layer][b], index[b, :, : count[b]]
            block, offset = np.divmod(wanted, self._block)
            place = table.place[block]
            source[b, :, : count[b]] = np.where(place >= 0, place * self._block + offset, -1)
            head, which = np.nonzero(place < 0)
            staging[b, head, which] = rows[head, wanted[head, which]]
            hits, misses = hits + wanted.size - len(head), misses + len(head)
            for i, fresh in enumerate(table.insert(self._most_wanted(block, int(end[b])))):
                start = fresh * self._block
                entering[b, i], blocks[b, i] = table.place[fresh], rows[:, start : start + self._block]
                entered += 1
        moved = misses + entered * K * self._block
        self.count(moved=moved, rows_posted=moved, rows_selected=hits + misses, hits=hits, misses=misses)
        return source, staging, entering, blocks

    def _most_wanted(self, block: np.ndarray, end: int) -> np.ndarray:
        """Whole blocks with selected tokens, those with most first, at most as many as the cache holds."""
        if not self._capacity:
            return np.zeros(0, np.int64)
        counts = np.bincount(block.ravel())[: end // self._block]
        ranked = np.argsort(-counts, kind="stable")[: self._capacity]
        return ranked[counts[ranked] > 0]
