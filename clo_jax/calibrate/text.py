"""Prompts to calibrate on, from our own generator or a user's file, and a held-out share that nothing is trained on."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from clo_jax.cache.calibration import digest
from clo_jax.eval.haystack import haystack, number_fact
from clo_jax.text import Tokenizer

_PLACES = ("observatory", "lighthouse", "library", "quarry", "greenhouse", "foundry", "brewery", "chapel")
_TASKS = (
    "Summarize the text above in detail.",
    "Which people appear in the text above, and what does each of them do?",
    "Continue the text above in the same style.",
)


class Prompts(NamedTuple):
    """Token ids; `train` to learn from, `held_out` to judge by."""

    train: list[list[int]]
    held_out: list[list[int]]

    def sha256(self) -> str:
        """Digest for the provenance of what was calibrated on them."""
        return digest([self.train, self.held_out])


def prompts(
    tokenizer: Tokenizer, *, count: int, held_out: int, num_tokens: int | Sequence[int], seed: int = 0,
    file: str | Path | None = None,
) -> Prompts:  # fmt: skip
    """Makes prompts that end in a task: asking for a number hidden in the text, for a summary, and the like.

    Args:
      tokenizer: the checkpoint's. Its chat template is used where it has one.
      count, held_out: numbers of prompts to train on and to judge by.
      num_tokens: length of each prompt, within 3 %; or several lengths, which prompts take in turn.
      seed: of the generated text, of the hidden numbers, and of which prompts are held out.
      file: UTF-8 text to cut into prompts, in place of generated text.

    Raises:
      ValueError: counts or lengths that make no sense, or a file that is too short for them.
    """
    lengths = [num_tokens] if isinstance(num_tokens, int) else list(num_tokens)
    for name, value, least in (("count", count, 1), ("held_out", held_out, 1), ("num_tokens", min(lengths), 128)):
        if value < least:
            raise ValueError(f"{name}: got {value}, wanted at least {least}")
    total = count + held_out
    order = list(range(total))
    random.Random(f"clo-jax calibration {seed}").shuffle(order)
    wanted = [lengths[place % len(lengths)] for place in range(total)]
    texts = _from_file(tokenizer, Path(file), wanted) if file is not None else None
    made = []
    for place in range(total):
        number = seed * total + order[place]  # other seeds give other texts
        sentence, _ = number_fact(_PLACES[number % len(_PLACES)], number)
        asks_number = place % 2 == 0
        task = (
            f"What is the secret number of the {_PLACES[number % len(_PLACES)]}?"
            if asks_number
            else _TASKS[place // 2 % len(_TASKS)]
        )
        room = wanted[place] - len(_wrap(tokenizer, "\n\n" + task))
        if texts is not None:
            room -= len(tokenizer.encode(" " + sentence, add_special_tokens=False)) if asks_number else 0
            text = tokenizer.decode(texts[order[place]][:room])
            half = text.rfind(" ", 0, len(text) // 2)
            text = f"{text[:half]} {sentence}{text[half:]}" if asks_number else text
        else:
            depth = random.Random(f"clo-jax depth {number}").uniform(0.1, 0.9)
            text = haystack(room, tokenizer, number, [(sentence, depth)] if asks_number else [])
        made.append(_wrap(tokenizer, f"{text}\n\n{task}"))
    return Prompts(made[:count], made[count:])


def _wrap(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text)


def _from_file(tokenizer: Tokenizer, file: Path, wanted: Sequence[int]) -> list[list[int]]:
    """Pieces of the file, none overlapping another, each long enough for any prompt."""
    ids, piece = tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False), max(wanted)
    if len(ids) < piece * len(wanted):
        raise ValueError(
            f"{file}: got {len(ids)} tokens, wanted {piece * len(wanted)} for {len(wanted)} prompts of {piece}"
        )
    return [ids[i * piece : (i + 1) * piece] for i in range(len(wanted))]
