"""Makes a results file of what a native benchmark printed: `python -m clo_jax.bench.native LOG WHAT FILE`.

The log has one tab-separated line a figure: name, value, unit, name of the control, control, goal; "-" where there is
no control or no goal. Anything else in it is an error: a benchmark that complains has not measured.
"""

import os
import pathlib
import sys

from clo_jax.bench import report


def rows(text: str) -> list[report.Row]:
    """The figures of a log.

    Raises:
      ValueError: a line that is not a figure; names it.
    """
    found = []
    for line in text.splitlines():
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
    return found


def main(log: str, what: str, path: str) -> None:
    """Writes the file and prints its table."""
    env = {name: value for name, value in os.environ.items() if name.startswith("CLO_JAX_")}
    print(report.markdown(report.write(pathlib.Path(path), what, {"log": pathlib.Path(log).name, **env},
                                       rows(pathlib.Path(log).read_text()))))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
