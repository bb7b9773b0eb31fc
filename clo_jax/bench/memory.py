"""What each policy keeps on the device and in host memory, by context length and batch: from the layouts that runs are
made with. Nothing is run."""

import dataclasses
from collections.abc import Sequence

from clo_jax.bench import report
from clo_jax.bench.subject import Subject
from clo_jax.bench.ways import require_sizes, title
from clo_jax.eval.variants import Variant

CONTEXTS = tuple(2**n for n in range(15, 21))  # 32K to 1M


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is computed. `contexts`: tokens that there is room for."""

    subject: Subject
    variants: Sequence[Variant]  # full attention first
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        require_sizes(self.subject, self.contexts, self.batches)


def contexts(subject: Subject) -> tuple[int, ...]:
    """`CONTEXTS` as far as the model goes, or its limit."""
    limit = subject.model.max_position_embeddings
    return tuple(n for n in CONTEXTS if n <= limit) or (limit,)


def rows(plan: Plan) -> list[report.Row]:
    """Device bytes of the cache; the control is full attention's."""
    made, subject = [], plan.subject
    for batch in plan.batches:
        for context in plan.contexts:
            full = None
            for variant in plan.variants:
                layout = subject.preparation(variant.load, context).layout(batch)
                parts = layout.device_bytes()
                full = sum(parts.values()) if full is None else full
                more = subject.describe() | {
                    "attention": variant.attention, "sparsity": variant.sparsity, "context": context, "batch": batch,
                    "device_kv_bytes": sum(parts.values()), "device_kv_parts": parts,
                    "host_kv_bytes": layout.host_bytes(),
                }  # fmt: skip
                name = title(variant.name, context, batch)
                made.append(report.Row(name, sum(parts.values()), "bytes", "full", full, None, more))
    return made
