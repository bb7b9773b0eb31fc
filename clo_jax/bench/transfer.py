"""Transfer backends of this machine: scattered rows of 512 bytes from host memory, as a refresh moves them, against a
contiguous copy. `clo_jax.bench.native` has the figures of the kernels alone."""

from collections.abc import Sequence

from clo_jax.bench import rates, report
from clo_jax.transfer.backends import backends, probe


def rows(names: Sequence[str], threads: Sequence[int | None]) -> tuple[list[report.Row], dict[str, str]]:
    """Bandwidth and latency of each backend, and why those that are missing cannot be had.

    Args:
      names: of backends; none: all that are available here.
      threads: numbers of copying threads to try, where a backend has threads; None: its default.

    Raises:
      ValueError: an unknown backend, or one that is named and cannot be had.
    """
    known = {found.name: found for found in backends()}
    for name in names:
        if name not in known:
            raise ValueError(f"--backends: got {name!r}, wanted {', '.join(known)}")
        if not known[name].available:
            raise ValueError(f"--backends: {name} cannot be had here: {known[name].reason}")
    link = rates.link_rate()
    made = rates.rows(rates.memory_rate(), link)
    for name in names or [name for name, found in known.items() if found.available]:
        done = set()
        for wanted in threads:
            found = probe(name, wanted)
            if found.threads in done:  # a backend without threads
                continue
            done.add(found.threads)
            more = {"backend": name, "threads": found.threads, "row_bytes": found.row_bytes}
            title = f"{name}, {found.threads} threads" if found.threads else name
            control = (rates.link_name(), link / 1e9)
            made.append(report.Row(f"{title}, scattered rows", found.gb_per_s, "GB/s", *control, None, more))
            made.append(report.Row(f"{title}, one row from post to delivery", found.latency_us, "us", more=more))
    return made, {name: found.reason for name, found in known.items() if not found.available}
