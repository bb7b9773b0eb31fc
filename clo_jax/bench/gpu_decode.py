"""Time of a decode step on a GPU at Llama-3-8B's layer shape with random weights: full attention, CLO with transfers
beside the program, in line, and without transfers.

    python -m clo_jax.bench.gpu_decode [--context 32768] [--layers 4] [--out FILE.json]

The control of every row is full attention, all rows on the device, in the same run. Random weights say nothing about
hit rates: `--sim-threshold 1` refreshes every head at every step, the most that can have to move. The rows that differ
in nothing but where transfers run say what running beside the program is worth.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import models
from clo_jax.bench import report
from clo_jax.cache.layout import CacheLayout
from clo_jax.config import CloConfig, ModelConfig, RopeConfig
from clo_jax.policies.clo import CloPolicy, neutral_scores
from clo_jax.policies.full import FullPolicy
from clo_jax.prompts import Request
from clo_jax.results import Metrics
from clo_jax.session import Session
from clo_jax.transfer.engine import Engine

CHUNK = 16


class InLine(Engine):
    """An engine whose transfers always run in the program's own stream."""

    def begin(self, requests: int) -> None:
        pass


def shape(layers: int) -> ModelConfig:
    """Llama-3-8B with fewer layers and a small vocabulary."""
    return ModelConfig("llama", 32000, 4096, 14336, layers, 32, 8, 128, 1e-5, 2**20, RopeConfig(500000.0), False)


def measure(model, params, policy, engine, prompt: list[int], new_tokens: int, repeats: int) -> list[Metrics]:
    """Metrics of each run after one that compiles."""
    found = []
    for _ in range(repeats + 1):
        session = Session(
            model, params, policy, policy.tables(), engine, Request([prompt], [new_tokens], [], None), CHUNK
        )
        for _ in session:
            pass
        found.append(session.metrics())
        m = found[-1]
        text = (
            f"{policy.name}: first token {m.ttft_s:.2f} s, step {m.tpot_s * 1e3:.3f} ms, compiled {m.compile_s:.1f} s"
        )
        print(text, file=sys.stderr, flush=True)
    return found[1:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode step on a GPU by where transfers run.")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=4 * CHUNK + 1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sparsity", type=float, default=0.1)
    parser.add_argument("--sim-threshold", type=float, default=0.8)
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "h200-decode.json")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        raise SystemExit("gpu_decode: JAX runs on " + jax.default_backend())
    model, clo = shape(args.layers), CloConfig(sparsity=args.sparsity, sim_threshold=args.sim_threshold)
    params = models.random_params(model, jax.random.key(0), jnp.bfloat16)
    length = args.context - args.new_tokens - 1
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, model.vocab_size, length)]
    layout = CacheLayout.clo(model, clo, 1, args.context, "bfloat16")
    arenas = dict(
        kv_heads=[len(layout.offloaded(layer)) for layer in range(args.layers)], batch=1, max_tokens=args.context,
        num_slots=layout.num_slots, head_dim=layout.head_dim, dtype=jnp.bfloat16,
    )  # fmt: skip
    measured: dict[str, list[Metrics]] = {}
    full = FullPolicy(CacheLayout.full(model, 1, args.context, "bfloat16"))
    measured["full attention"] = measure(model, params, full, None, prompt, args.new_tokens, args.repeats)
    for name, kind, offload in (
        ("clo, transfers beside the program", Engine, True),
        ("clo, transfers in line", InLine, True),
        ("clo, rows on the device, nothing moves", Engine, False),
    ):
        with contextlib.closing(kind(**arenas, kv_offload=offload)) as engine:
            policy = CloPolicy(layout, clo, engine.handle, neutral_scores(layout))
            measured[name] = measure(model, params, policy, engine, prompt, args.new_tokens, args.repeats)
    control = statistics.median(m.tpot_s for m in measured["full attention"]) * 1e3
    rows = []
    for name, runs in measured.items():
        times, last = [m.tpot_s * 1e3 for m in runs], runs[-1]
        steps = args.new_tokens - 1
        more = {"repeats": len(times), "min": min(times), "max": max(times), "hit_rate": last.hit_rate,
                "device_kv_bytes": last.device_kv_bytes, "host_kv_bytes": last.host_kv_bytes}  # fmt: skip
        if last.backend is not None:  # an engine took part
            more |= {"rows_moved_a_step": last.rows_moved / steps, "wait_ms_a_step": last.wait_s * 1e3 / steps}
        rows.append(report.Row(f"step, {name}", statistics.median(times), "ms", "full attention", control, None, more))
        print(rows[-1].to_dict(), flush=True)
    print(report.markdown(report.write(args.out, "decode", vars(args) | {"out": args.out.name}, rows)))


if __name__ == "__main__":
    main()
