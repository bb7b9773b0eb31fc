"""Whole generations on a GPU at Llama-3-8B's layer shape with random weights: prefill, decode, and what they cost the
host; full attention, CLO with its rows on the device, CLO with its rows in host memory.

    python -m clo_jax.bench.gpu_decode [--context 32768] [--layers 4] [--backend auto] [--out FILE.json]

The hit rates of random weights say nothing (`clo_jax.bench.layer` gives them), so a step's time here is that of this
threshold and no other. What holds for any: how much of prefill the copy to the host costs, that decode steps launch
nothing from the host but captured graphs, and the processor time of a token.
"""

import argparse
import dataclasses
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import _host, models
from clo_jax.bench import report
from clo_jax.bench.layer import llama_3_8b
from clo_jax.cache.layout import CacheLayout
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.policies.base import Policy
from clo_jax.policies.clo import CloPolicy, neutral_scores
from clo_jax.policies.full import FullPolicy
from clo_jax.prompts import Request
from clo_jax.session import Session
from clo_jax.transfer.engine import Engine

CHUNK = 16


@dataclasses.dataclass(frozen=True)
class Costs:
    """One generation, compiled before."""

    prefill_s: float
    step_s: float
    processor_s: float  # user and system time of the process, of one decode step
    launches: float  # of the product's kernels by the host, of one decode step
    hit_rate: float | None
    rows_moved: float | None  # of one decode step


def generation(
    model: ModelConfig, params, policy: Policy, engine: Engine | None, prompt: list[int], new_tokens: int
) -> Costs:
    """Costs of one generation."""
    session = Session(model, params, policy, policy.tables(), engine, Request([prompt], [new_tokens], [], None), CHUNK)
    answer = iter(session)
    next(answer)  # prefill and the first token
    launches, used, start = _host.handler_launches(), processor_seconds(), time.perf_counter()
    for _ in answer:
        pass
    steps, end = new_tokens - 1, time.perf_counter()
    metrics = session.metrics()
    return Costs(
        prefill_s=metrics.ttft_s,
        step_s=(end - start) / steps,
        processor_s=(processor_seconds() - used) / steps,
        launches=(_host.handler_launches() - launches) / steps,
        hit_rate=metrics.hit_rate,
        rows_moved=None if engine is None else metrics.rows_moved / steps,
    )


def processor_seconds() -> float:
    """User and system time of this process, all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(
    model: ModelConfig, clo: CloConfig, context: int, new_tokens: int, repeats: int, dtype: str, backend: str
) -> dict[str, list[Costs]]:
    """Costs of every way, after one generation that compiles it."""
    params = models.random_params(model, jax.random.key(0), jnp.dtype(dtype))
    length = context - new_tokens - 1
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, model.vocab_size, length)]
    layout = CacheLayout.clo(model, clo, 1, context, dtype)
    found: dict[str, list[Costs]] = {}

    def run(name: str, policy: Policy, engine: Engine | None) -> None:
        runs = [generation(model, params, policy, engine, prompt, new_tokens) for _ in range(repeats + 1)]
        found[name] = runs[1:]
        print(f"{name}: {runs}", file=sys.stderr, flush=True)

    run("full", FullPolicy(CacheLayout.full(model, 1, context, dtype)), None)
    for name, offload in (("device", False), ("host", True)):
        with Engine(
            kv_heads=[len(layout.offloaded(layer)) for layer in range(model.num_layers)], batch=1, max_tokens=context,
            num_slots=layout.num_slots, head_dim=layout.head_dim, dtype=jnp.dtype(dtype), backend=backend,
            kv_offload=offload,
        ) as engine:  # fmt: skip
            run(name, CloPolicy(layout, clo, engine.handle, neutral_scores(layout)), engine)
    return found


def rows(found: dict[str, list[Costs]], length: int) -> list[report.Row]:
    """The figures, medians of the repeats."""
    names = {"full": "full attention", "device": "clo, rows on the device", "host": "clo, rows in host memory"}

    def median(name: str, field: str) -> float:
        return statistics.median(getattr(costs, field) for costs in found[name])

    made = []
    for name in ("full", "host"):
        value, control = (length / median(which, "prefill_s") for which in (name, "device"))
        goal = ">= 0.95" if name == "host" else None
        made.append(report.Row(f"prefill, {names[name]}", value, "tokens/s", names["device"], control, goal))
    for name in ("device", "host"):
        last = found[name][-1]
        more = {"hit_rate": last.hit_rate, "rows_moved_a_step": last.rows_moved}
        value, control = (median(which, "step_s") * 1e3 for which in (name, "full"))
        made.append(report.Row(f"decode step, {names[name]}", value, "ms", names["full"], control, None, more))
    for name in ("full", "host"):
        value, control = (median(which, "processor_s") * 1e3 for which in (name, "device"))
        more = {"share_of_the_step": median(name, "processor_s") / median(name, "step_s")}
        made.append(
            report.Row(
                f"processor time of a decode step, {names[name]}", value, "ms", names["device"], control, None, more
            )
        )
    for name in ("full", "device", "host"):
        made.append(report.Row(f"kernel launches by the host, {names[name]}", median(name, "launches"), "a step"))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generations on a GPU by where the rows are.")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=4 * CHUNK + 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sparsity", type=float, default=0.1)
    parser.add_argument("--sim-threshold", type=float, default=0.8)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "h200-decode.json")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        raise SystemExit("gpu_decode: JAX runs on " + jax.default_backend())
    clo = CloConfig(sparsity=args.sparsity, sim_threshold=args.sim_threshold)
    found = measure(llama_3_8b(args.layers), clo, args.context, args.new_tokens, args.repeats, "bfloat16", args.backend)
    content = report.write(
        args.out, "decode", vars(args) | {"out": args.out.name}, rows(found, args.context - args.new_tokens - 1)
    )
    print(report.markdown(content))


if __name__ == "__main__":
    main()
