"""Makes a results file of what native benchmarks printed: `python -m clo_jax.bench.native WHAT FILE LOG...`.

A log has one tab-separated line a figure: name, value, unit, name of the control, control, goal; "-" where there is no
control or no goal. Lines without a tab are for people. A benchmark that fails says so by its exit status.
"""

import os
import pathlib
import sys

from clo_jax.bench import report


def rows(text: str) -> list[report.Row]:
    """The figures of a log.

    Raises:
      ValueError: a line with tabs that is not a figure, which it names; no figure at all.
    """
    found = []
    for line in text.splitlines():
        if "\t" not in line:
            continue
        fields = line.split("\t")
        if len(fields) != 6:
            raise ValueError(f"log: got {line!r}, wanted six fields between tabs")
        name, value, unit, control_name, control, goal = fields
        with_control = control_name != "-"
        found.append(
            report.Row(
                name,
                float(value),
                unit,
                control_name if with_control else None,
                float(control) if with_control else None,
                None if goal == "-" else goal,
            )
        )
    if not found:
        raise ValueError("log: got no figure, wanted lines of six fields between tabs")
    return found


def main(what: str, path: str, *logs: str) -> None:
    """Writes the file and prints its table."""
    env = {name: value for name, value in os.environ.items() if name.startswith("CLO_JAX_")}
    found = [row for log in logs for row in rows(pathlib.Path(log).read_text())]
    args = {"logs": [pathlib.Path(log).name for log in logs], **env}
    print(report.markdown(report.write(pathlib.Path(path), what, args, found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
