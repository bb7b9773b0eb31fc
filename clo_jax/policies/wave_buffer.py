"""RetroInfer's wave buffer, as the CPU sees it: rows by cluster in host memory, and what the device caches of them."""

import numpy as np

from clo_jax.policies.host_rows import HostRows


class LruClusters:
    """Clusters in a device cache of pages, least recently used first, and its free pages."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))
        self._pages: dict[int, list[int]] = {}  # in order of use: a dict keeps it

    def access(self, wanted: list[int], need: dict[int, int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Uses clusters; those that are not there are admitted in turn, while pages can be had for them from clusters
        that are not wanted now.

        need: pages of each wanted cluster. Returns the pages of those that were there, and of those that enter.
        """
        hits = {cluster: self._pages[cluster] for cluster in wanted if cluster in self._pages}
        for cluster in hits:
            self._pages[cluster] = self._pages.pop(cluster)
        entered: dict[int, list[int]] = {}
        for cluster in wanted:
            if cluster in hits:
                continue
            while len(self._free) < need[cluster] and (oldest := next(iter(self._pages), None)) is not None:
                if oldest in need:
                    break
                self._free += self._pages.pop(oldest)
            if len(self._free) < need[cluster]:
                break
            entered[cluster] = self._pages[cluster] = [self._free.pop(0) for _ in range(need[cluster])]
        return hits, entered


class ClusterRows(HostRows):
    """Rows in host memory, those of a cluster side by side, and an LRU list per layer, sequence and KV head."""

    def __init__(self, layout, room: int, pages: int, page: int, buffer: int, sink: int) -> None:
        """room: clusters of a head; pages: of the device cache of a head, with `page` rows each; buffer: rows of the
        execution buffer of a head; sink: first tokens that are in no cluster."""
        super().__init__(layout)
        self._room, self._num_pages, self._page, self._buffer, self._sink = room, pages, page, buffer, sink
        self._lists: dict[int, list[list[LruClusters]]] = {}
        self._starts: dict[int, np.ndarray] = {}  # [B, K, room]: first row of each cluster
        self._sizes: dict[int, np.ndarray] = {}
        self._filled: dict[int, np.ndarray] = {}  # [B]: rows that are there
        self._tokens: dict[int, np.ndarray] = {}  # [B, K, S] int32: token of each row

    def on_build(self, layer: int, rows: np.ndarray, labels: np.ndarray) -> tuple[()]:
        """Begins with a prompt: rows [B, K, N, 2, D] and the cluster of each [B, K, N], -1: not indexed."""
        B, K, _ = labels.shape
        self._lists[layer] = [[LruClusters(self._num_pages) for _ in range(K)] for _ in range(B)]
        self._starts[layer] = np.zeros((B, K, self._room), np.int64)
        self._sizes[layer] = np.zeros((B, K, self._room), np.int64)
        self._filled[layer] = np.zeros(B, np.int64)
        self._tokens[layer] = np.zeros((B, K, self.layout.max_tokens), np.int32)
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
        for b in range(B):
            filled = self._filled[layer][b]
            for head in range(K):
                label = labels[b, head]
                order = np.argsort(label, kind="stable")[np.count_nonzero(label < 0) :]
                self._rows[layer][b, head, filled : filled + len(order)] = rows[b, head, order]
                self._tokens[layer][b, head, filled : filled + len(order)] = first_token[b] + order
                sizes = np.bincount(label[order])
                where = slice(first[b], first[b] + len(sizes))
                self._sizes[layer][b, head, where] = sizes
                self._starts[layer][b, head, where] = filled + np.cumsum(sizes) - sizes
            self._filled[layer][b] += len(order)
            self._offloaded(len(order) * K)

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
        rows = [np.arange(start, start + n) for start, n in zip(starts, sizes, strict=True)]
        return self._tokens[layer][b, head, np.concatenate(rows)] if rows else np.zeros(0, np.int32)

    def on_access(
        self, layer: int, clusters: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fills the execution buffer with the rows of clusters [B, K, n], of which the first count[b, k] are wanted.

        Returns where in the device cache each row of the buffer is, int32 [B, K, E], -1: nowhere; the others' rows
        [B, K, E, 2, D]; and where in the cache each row of the buffer goes afterwards, int32 [B, K, E], -1: nowhere.
        """
        self.remember(layer, clusters, count)
        B, K, _ = clusters.shape
        store = self._rows[layer]
        source = np.full((B, K, self._buffer), -1, np.int32)
        target = np.full((B, K, self._buffer), -1, np.int32)
        staging = np.zeros((B, K, self._buffer, 2, self.layout.head_dim), store.dtype)
        rows_hit = rows_missed = 0
        for b in range(B):
            for head in range(K):
                wanted = clusters[b, head, : count[b, head]].tolist()
                sizes, starts = self._sizes[layer][b, head], self._starts[layer][b, head]
                need = {cluster: -(-int(sizes[cluster]) // self._page) for cluster in wanted}
                hits, entered = self._lists[layer][b][head].access(wanted, need)
                at = 0
                for cluster in wanted:
                    n, start = int(sizes[cluster]), int(starts[cluster])
                    here = slice(at, at + n)
                    if cluster in hits:
                        source[b, head, here] = self._places(hits[cluster], n)
                        rows_hit += n
                    else:
                        staging[b, head, here] = store[b, head, start : start + n]
                        rows_missed += n
                    if cluster in entered:
                        target[b, head, here] = self._places(entered[cluster], n)
                    at += n
        self.count(
            moved=rows_missed, rows_posted=rows_missed, rows_selected=rows_hit + rows_missed, hits=rows_hit,
            misses=rows_missed,
        )  # fmt: skip
        return source, staging, target

    def _places(self, pages: list[int], n: int) -> np.ndarray:
        """The first n rows of pages, in the cache."""
        return (np.array(pages)[:, None] * self._page + np.arange(self._page)).ravel()[:n]
