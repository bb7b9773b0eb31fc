// The order of transfers: requests of layers, first in first out, cut into chunks that several threads share. Plain
// state without a lock: the engine makes every call under one mutex, and tests/test_protocol.cc enumerates every order
// in which its callers can make them.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace clo {

class TransferQueue {
 public:
  struct Claim {
    int64_t layer;
    int64_t chunk;      // of the layer's request, from 0
    uint64_t sequence;  // of the layer's request
  };

  explicit TransferQueue(int64_t layers) : requests_(static_cast<size_t>(layers)) {}

  // Sequence number of the layer's last request, 0 before the first, and whether all its chunks are finished.
  uint64_t posted(int64_t layer) const { return at(layer).posted; }
  bool outstanding(int64_t layer) const { return at(layer).unfinished > 0; }

  // A new request of `chunks` > 0 chunks; the layer's previous one must not be outstanding. Returns its number.
  uint64_t post(int64_t layer, int64_t chunks) {
    Entry& e = at(layer);
    e.chunks = e.unfinished = chunks;
    e.claimed = 0;
    waiting_.push_back(layer);
    return ++e.posted;
  }

  bool has_work() const { return !waiting_.empty(); }

  // The next chunk of the oldest request that has one left; there must be one.
  Claim claim() {
    const int64_t layer = waiting_.front();
    Entry& e = at(layer);
    const Claim claim{layer, e.claimed++, e.posted};
    if (e.claimed == e.chunks) waiting_.pop_front();
    return claim;
  }

  // Reports a claimed chunk as copied. True for the last one of its request: its rows are then all there.
  bool finish(const Claim& claim) { return --at(claim.layer).unfinished == 0; }

  // Forgets every request that is not finished. No chunk may be claimed and unfinished by a thread that lives on.
  void clear() {
    waiting_.clear();
    for (Entry& e : requests_) e.unfinished = 0;
  }

 private:
  struct Entry {
    uint64_t posted = 0;
    int64_t chunks = 0, claimed = 0, unfinished = 0;
  };
  Entry& at(int64_t layer) { return requests_[static_cast<size_t>(layer)]; }
  const Entry& at(int64_t layer) const { return requests_[static_cast<size_t>(layer)]; }

  std::vector<Entry> requests_;
  std::deque<int64_t> waiting_;  // layers whose request has unclaimed chunks
};

}  // namespace clo
