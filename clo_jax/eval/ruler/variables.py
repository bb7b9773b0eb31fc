"""RULER's variable tracking (vt): a chain of assignments in a text of filler; which variables hold a value?"""

import random

from clo_jax.eval import words
from clo_jax.eval.ruler.needles import DEPTHS, FILLER, insert
from clo_jax.eval.samples import Draft
from clo_jax.eval.sources import Sources

HOPS = 4  # assignments from a variable, after the one of the value
_EXAMPLE_FILLER = 10  # sentences in the example that comes before the question


def draft(rng: random.Random, size: int, length: int, sources: Sources, index: int) -> Draft:
    """`size`: sentences of filler. An example with its answer comes first, with other names and another value."""
    names = words.distinct(lambda: words.variable(rng), 2 * (HOPS + 1))
    values = rng.sample(range(10000, 100000), 2)
    example, opening, _ = _problem(rng, names[HOPS + 1 :], values[1], _EXAMPLE_FILLER)
    text, prefix, places = _problem(rng, names[: HOPS + 1], values[0], size)
    solved = f"{example}\n{opening} {', '.join(names[HOPS + 1 :])}."
    return Draft(f"{solved}\n\n{text}", prefix, tuple(names[: HOPS + 1]), places)


def _problem(rng: random.Random, names: list[str], value: int, size: int) -> tuple[str, str, tuple[float, ...]]:
    """(message, opening of the answer, depths of the assignments)."""
    chain = [f"VAR {names[0]} = {value}."]
    chain += [f"VAR {name} = VAR {before}." for before, name in zip(names, names[1:], strict=False)]
    places = tuple(sorted(rng.sample(DEPTHS, len(chain))))
    filler = insert([FILLER[i % len(FILLER)] for i in range(size)], chain, places)
    text = (
        "Follow the assignments of variables that are hidden in the following text.\n\n"
        f"{filler}\n\nQuestion: Which variables have the value {value} in the text above, directly or through others?"
    )
    return text, f"Answer: These {len(names)} variables have the value {value}:", places
