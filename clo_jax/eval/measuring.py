"""Selection recall in a suite of tasks: along full attention's own answers to the first samples of each task and
length, kept beside the answers. What is there already is not measured again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clo_jax.config import ModelConfig
from clo_jax.eval.answers import AnswerFile, Key
from clo_jax.eval.samples import PromptFormat, Sample
from clo_jax.eval.selection import References
from clo_jax.eval.variants import FULL, Variant

TOKENS = 16  # of an answer, at most


class Measuring:
    """A context manager around the asking; `run` for each variant after its answers, full attention first."""

    def __init__(
        self, config: ModelConfig, samples: int, variants: Sequence[Variant], keys: Mapping[str, str],
        prompts: PromptFormat, fitting: Mapping[tuple[int, str], Sequence[Sample]], file: AnswerFile,
    ) -> None:  # fmt: skip
        """samples: of each task and length, the first ones. keys: digest of a variant's settings, by its name.

        Raises:
          CloError: no room in the temporary folder.
        """
        self._variants = [variant for variant in variants if variant.attention != FULL.attention]
        self._keys, self._prompts, self._file = keys, prompts, file
        self._chosen = [(length, sample) for (length, _), made in fitting.items() for sample in made[:samples]]
        wanted = [
            (length, sample) for length, sample in self._chosen
            if any(self._key(variant, length, sample) not in file.kept for variant in self._variants)
        ]  # fmt: skip
        self._references = References(config, TOKENS * sum(length for length, _ in wanted), "--recall")

    def __enter__(self) -> "Measuring":
        return self

    def __exit__(self, *exc: object) -> None:
        self._references.__exit__(*exc)

    def keys(self) -> list[Key]:
        """Of all that is measured, also of what is left out because full attention's answer is empty."""
        return [self._key(variant, *one) for variant in self._variants for one in self._chosen]

    def open(self, variant: Variant) -> list[tuple[int, Sample]]:
        """Lengths and samples to measure a variant along, as far as full attention has answered; of full attention
        itself those that others want. Empty answers are left out."""
        wanting = self._variants if variant.attention == FULL.attention else [variant]
        return [
            (length, sample) for length, sample in self._chosen
            if any(self._key(other, length, sample) not in self._file.kept for other in wanting)
            and self._answer(length, sample)
        ]  # fmt: skip

    def run(self, llm: Any, variant: Variant, advance: Callable[[int], Any]) -> None:
        """Measures what is open."""
        for length, sample in self.open(variant):
            prompt = self._prompts.encode(sample.text, sample.prefix, sample.chat)
            answer = self._answer(length, sample)[: max(length - len(prompt) - 1, 1)]
            tokens = [*prompt, *answer, answer[-1]]  # the last one is not decoded
            name = (length, sample.task, sample.index)
            if variant.attention == FULL.attention:
                self._references.take(name, llm, tokens, len(prompt))
            else:
                kept = self._references.compare(name, llm, tokens, len(prompt), variant.sparsity)
                self._file.keep(self._key(variant, length, sample), kept)
            advance(1)

    def _key(self, variant: Variant, length: int, sample: Sample) -> Key:
        return Key(variant.name, self._keys[variant.name], length, sample.task, sample.index)

    def _answer(self, length: int, sample: Sample) -> list[int]:
        """The first tokens of full attention's answer, as its text has them."""
        answer = self._file.answers.get(self._key(FULL, length, sample))
        if answer is None:
            return []
        return self._prompts.tokenizer.encode(answer.text, add_special_tokens=False)[:TOKENS]
