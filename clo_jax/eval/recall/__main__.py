"""Trains the recall model: python -m clo_jax.eval.recall OUT [--seed 0]."""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence

import jax

from clo_jax.eval.recall import training
from clo_jax.eval.recall.folder import TRAINING, write
from clo_jax.versions import versions


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Trains a small model on chains of lookups and writes a checkpoint.")
    parser.add_argument("out", type=pathlib.Path, help="folder of the checkpoint; must not exist")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.out.exists():
        parser.error(f"out: {args.out} is there already")
    config, start = training.model_config(), time.perf_counter()

    def tell(done: training.Progress) -> None:
        print(
            f"{time.perf_counter() - start:6.1f} s, {done.length} tokens, step {done.step}: loss {done.loss:.4f}, "
            f"{done.right:.2%} of lookups right", file=sys.stderr, flush=True,
        )  # fmt: skip

    params = training.train(config, training.Settings(seed=args.seed), tell)
    seconds = time.perf_counter() - start
    right = {}
    for records in (1300, 5400, 10800, 21800):
        right[records] = training.lookups_right(config, params, range(4), records, 16)
        print(f"{records} records: {right[records]:.2%} of lookups right", file=sys.stderr, flush=True)
    result = write(config, params, args.out)
    note = {
        "seconds": seconds, "device": jax.devices()[0].device_kind, "seed": args.seed, "versions": versions(),
        "lookups_right_by_records": right,
    }  # fmt: skip
    (result.path / TRAINING).write_text(json.dumps(note, indent=1) + "\n")
    print(f"{result.path}: {result.num_bytes / 1e6:.1f} MB, trained in {seconds:.0f} s")


if __name__ == "__main__":
    main()
