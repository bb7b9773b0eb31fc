"""RetroInfer's wave buffer, as the CPU sees it: rows by cluster in host memory, and what the device caches of them."""

import numpy as np

from clo_jax.policies import ragged
from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.host_rows import spread, threads_for
from clo_jax.policies.staging import CachedRows


class LruClusters:
    """Clusters of many heads in device caches of pages, one cache for each head. Least recently used ones leave first.

    Every cluster has slots of its own, as many as it has pages: `slot` [H, C] is the first one, `pages` [H, C] their
    number. Who fills them in before a cluster is asked for.
    """

    def __init__(self, heads: int, room: int, cached: int, slots: int) -> None:
        """room: C, clusters of a head; cached: pages of its cache; slots: of all its clusters."""
        self.slot = np.zeros((heads, room), np.int64)
        self.pages = np.zeros((heads, room), np.int64)
        self._page = np.zeros((heads, slots), np.int64)  # the page in each slot of a cluster that is there
        self._there = np.zeros((heads, room), bool)
        self._order = np.zeros((heads, cached), np.int64)  # clusters that are there, least recently used first
        self._number = np.zeros(heads, np.int64)  # how many
        # Free pages of each head, a ring: first freed, first used.
        self._free = np.tile(np.arange(cached), (heads, 1))
        self._first, self._left = np.zeros(heads, np.int64), np.full(heads, cached)

    def access(self, wanted: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Uses clusters in turn; those that are not there are admitted in turn, while pages can be had for them from
        clusters that are not wanted now. When they cannot, what is not wanted has left all the same.

        wanted [H, n]: different clusters of a head that have rows, where `asked` [H, n] says so. Returns which of them
        were there and which enter, bool [H, n].
        """
        head = np.arange(len(wanted))[:, None]
        hit = asked & self._there[head, wanted]
        missed = asked & ~hit
        pages = np.where(missed, self.pages[head, wanted], 0)
        busy = np.zeros(self._there.shape, bool)
        busy[np.nonzero(asked)[0], wanted[asked]] = True
        order = self._order[:, : self._number.max()]
        idle = (np.arange(order.shape[1])[None] < self._number[:, None]) & ~busy[head, order]
        idle_pages = np.where(idle, self.pages[head, order], 0)

        entered = missed & (np.cumsum(pages, axis=1) <= (self._left + idle_pages.sum(axis=1))[:, None])
        short = pages.sum(axis=1) - self._left
        leaves = idle & (ragged.before(idle_pages) < short[:, None])
        self._release(*_which(leaves, order))
        self._admit(*_which(entered, wanted))

        kept = np.concatenate([idle & ~leaves, hit, entered], axis=1)
        row, column = np.nonzero(kept)
        place = (np.cumsum(kept, axis=1) - 1)[row, column]
        self._order[row, place] = np.concatenate([order, wanted, wanted], axis=1)[row, column]
        self._number = kept.sum(axis=1)
        return hit, entered

    def row(self, head: np.ndarray, cluster: np.ndarray, index: np.ndarray, page: int) -> np.ndarray:
        """Where rows of clusters that are there are in the cache of their head, with `page` rows a page; index: of the
        row in its cluster. All [n]."""
        return self._page[head, self.slot[head, cluster] + index // page] * page + index % page

    def _release(self, head: np.ndarray, cluster: np.ndarray) -> None:
        self._there[head, cluster] = False
        heads, slots, ring = self._ring(head, cluster, self._first + self._left)
        self._free[heads, ring] = self._page[heads, slots]
        self._left += np.bincount(heads, minlength=len(self._left))

    def _admit(self, head: np.ndarray, cluster: np.ndarray) -> None:
        self._there[head, cluster] = True
        heads, slots, ring = self._ring(head, cluster, self._first)
        self._page[heads, slots] = self._free[heads, ring]
        taken = np.bincount(heads, minlength=len(self._left))
        self._first, self._left = self._first + taken, self._left - taken

    def _ring(self, head: np.ndarray, cluster: np.ndarray, begin: np.ndarray) -> tuple[np.ndarray, ...]:
        """The head, the slot and the place in the ring of each page of clusters, ordered by head; begin [H]."""
        pages = self.pages[head, cluster]
        heads = np.repeat(head, pages)
        slots = np.repeat(self.slot[head, cluster], pages) + ragged.steps(pages)
        turn = ragged.steps(np.bincount(heads, minlength=len(begin)))
        return heads, slots, (begin[heads] + turn) % self._free.shape[1]


def _which(chosen: np.ndarray, cluster: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Heads and clusters of the chosen ones, ordered by head."""
    return np.nonzero(chosen)[0], cluster[chosen]


class ClusterRows(CachedRows):
    """Rows in host memory, those of a cluster side by side, and an LRU list per layer, sequence and KV head."""

    def __init__(self, layout: RivalLayout, room: int, pages: int, page: int, buffer: int, sink: int) -> None:
        """room: clusters of a head; pages: of the device cache of a head, with `page` rows each; buffer: rows of the
        execution buffer of a head; sink: first tokens that are in no cluster."""
        super().__init__(layout, buffer, pages * page, layout.batch * layout.num_kv_heads * buffer)
        self._room, self._num_pages, self._page, self._buffer, self._sink = room, pages, page, buffer, sink
        self._lists: dict[int, LruClusters] = {}
        self._starts: dict[int, np.ndarray] = {}  # [B, K, room]: first row of each cluster
        self._sizes: dict[int, np.ndarray] = {}
        self._filled: dict[int, np.ndarray] = {}  # [B]: rows that are there
        self._tokens: dict[int, np.ndarray] = {}  # [B, K, S] int32: token of each row
        self._cached: dict[int, np.ndarray] = {}  # [B K S] int32: where in its head's cache a row is, if it is there

    def on_build(self, layer: int, rows: np.ndarray, labels: np.ndarray) -> tuple[()]:
        """Begins with a prompt: rows [B, K, N, 2, D] and the cluster of each [B, K, N], -1: not indexed."""
        B, K, _ = labels.shape
        slots = self.layout.max_tokens // self._page + self._room
        self._lists[layer] = LruClusters(B * K, self._room, self._num_pages, slots)
        self._starts[layer] = np.zeros((B, K, self._room), np.int64)
        self._sizes[layer] = np.zeros((B, K, self._room), np.int64)
        self._filled[layer] = np.zeros(B, np.int64)
        self._tokens[layer] = np.zeros((B, K, self.layout.max_tokens), np.int32)
        self._cached[layer] = np.zeros(B * K * self.layout.max_tokens, np.int32)
        self._add(layer, rows, labels, np.zeros(B, np.int64), np.zeros(B, np.int64))
        return ()

    def on_extend(self, layer: int, rows: np.ndarray, labels: np.ndarray, first: np.ndarray) -> tuple[()]:
        """Adds clusters of the tokens that follow the indexed ones: rows and labels as `on_build`, the labels of
        sequence b count from first[b]."""
        self._add(layer, rows, labels, first, self._sink + self._filled[layer])
        return ()

    def _add(
        self, layer: int, rows: np.ndarray, labels: np.ndarray, first: np.ndarray, first_token: np.ndarray
    ) -> None:
        """As `on_extend`; rows[b, :, i] are those of token first_token[b] + i."""
        B, K, _ = labels.shape
        # 16 bits are sorted in linear time.
        order = np.argsort(labels.astype(np.int16) if self._room < 2**15 else labels, axis=2, kind="stable")
        left_out = np.count_nonzero(labels < 0, axis=2)
        filled = self._filled[layer]

        def fill(each: int) -> None:
            b, head = divmod(each, K)
            chosen = order[b, head, left_out[b, head] :]
            here = slice(filled[b], filled[b] + len(chosen))
            np.take(rows[b, head], chosen, axis=0, out=self._rows[layer][b, head, here], mode="clip")
            self._tokens[layer][b, head, here] = first_token[b] + chosen
            sizes = np.bincount(labels[b, head, chosen])
            where = slice(first[b], first[b] + len(sizes))
            self._sizes[layer][b, head, where] = sizes
            self._starts[layer][b, head, where] = filled[b] + ragged.before(sizes)

        spread(fill, B * K, threads_for(rows.nbytes))
        added = labels.shape[2] - left_out[:, 0]
        filled += added
        self._offloaded(int(added.sum()) * K)
        lists = self._lists[layer]
        sizes, starts = (x[layer].reshape(B * K, -1) for x in (self._sizes, self._starts))
        # A cluster's pages are at most one more than its whole ones, so that these slots are its own.
        lists.pages[:], lists.slot[:] = -(-sizes // self._page), starts // self._page + np.arange(self._room)

    def selected(self, layer: int) -> list[list[np.ndarray]]:
        """Tokens of the clusters that the last step of a layer retrieved, by [B][K]. ValueError before the first
        step."""
        wanted, count = self._last(layer)
        return [
            [self._members(layer, b, head, wanted[b, head, : count[b, head]]) for head in range(wanted.shape[1])]
            for b in range(len(wanted))
        ]

    def _members(self, layer: int, b: int, head: int, clusters: np.ndarray) -> np.ndarray:
        starts, sizes = self._starts[layer][b, head, clusters], self._sizes[layer][b, head, clusters]
        return self._tokens[layer][b, head, np.repeat(starts, sizes) + ragged.steps(sizes)]

    def on_access(self, layer: int, clusters: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, ...]:
        """Fills the execution buffer with the rows of clusters [B, K, n], of which the first count[b, k] are wanted.

        Returns where in the device cache each row of the buffer is, int32 [B, K, E], -1: nowhere; then the other rows,
        as `_send`.
        """
        self.remember(layer, clusters, count)
        B, K, n = clusters.shape
        wanted = clusters.reshape(B * K, n)
        asked = np.arange(n)[None] < count.reshape(B * K, 1)
        lists = self._lists[layer]
        hit, entered = lists.access(wanted, asked)
        head = np.arange(B * K)[:, None]
        sizes, starts = (x[layer].reshape(B * K, -1)[head, wanted] for x in (self._sizes, self._starts))
        # Of each cluster's first row: which it is of all rows of the layer, and its place in all buffers.
        row, at = head * self.layout.max_tokens + starts, head * self._buffer + ragged.before(np.where(asked, sizes, 0))

        def rows(which: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Of each row of the chosen clusters: which it is in its cluster, of all, and its place."""
            number = sizes[which]
            index = ragged.steps(number)
            return index, np.repeat(row[which], number) + index, np.repeat(at[which], number) + index

        cached = self._cached[layer]
        index, of_all, _ = rows(entered)
        heads, clusters = (np.repeat(x, sizes[entered]) for x in _which(entered, wanted))
        cached[of_all] = lists.row(heads, clusters, index, self._page)
        source = np.full((B, K, self._buffer), -1, np.int32)
        _, of_all, place = rows(hit)
        source.reshape(-1)[place] = cached[of_all]
        missed = asked & ~hit
        _, of_all, place = rows(missed)
        first = np.where(entered, head * (self._num_pages * self._page), -1)[missed]
        first = np.repeat(first, sizes[missed])
        target = np.where(first >= 0, first + cached[of_all], -1)
        rows_hit, rows_missed = int(sizes[hit].sum()), len(of_all)
        self.count(
            moved=rows_missed, rows_posted=rows_missed, rows_selected=rows_hit + rows_missed, hits=rows_hit,
            misses=rows_missed,
        )  # fmt: skip
        return source, *self._send(layer, of_all, place, target)
