"""A model that needs none: finds the secret number of a prompt itself, and predicts a text in a known way."""

import re
import sys
import types

import numpy as np

from clo_jax.checkpoints import read_info
from clo_jax.policies.attended import Attended
from clo_jax.text import Tokenizer


def plant(monkeypatch, checkpoint):
    """Puts a fresh class in place of LLM and returns it: `loads`, `asked`, `watched` remember; `answer` is given in
    place of the right one; after `fail_after` prompts Ctrl-C comes."""
    tokenizer, layers = Tokenizer.from_folder(checkpoint), read_info(checkpoint)[0].num_layers

    class LLM:
        loads, asked, watched, fail_after, answer = [], [], [], None, None

        def __init__(self, options):
            self.options = options

        @classmethod
        def load(cls, path, **options):
            cls.loads.append(options)
            return cls(options)

        def generate(self, prompts, *, max_new_tokens):
            cls = type(self)
            if cls.fail_after is not None and len(cls.asked) + len(prompts) > cls.fail_after:
                raise KeyboardInterrupt
            found = []
            for ids in prompts:
                text = tokenizer.decode(ids, skip_special_tokens=False)
                cls.asked.append((text, max_new_tokens))
                answer = cls.answer
                if answer is None:
                    key = re.search(r"What is the secret number for (\S+) ", text)[1]
                    answer = re.search(rf"number for {key} is (\d+)", text)[1]
                costs = types.SimpleNamespace(backend="host", hit_rate=0.25, rows_moved=60)
                found.append(
                    types.SimpleNamespace(
                        text=answer, finish_reason="stop", metrics=costs, prompt_tokens=len(ids), completion_tokens=5
                    )
                )
            return found

        def forced_logits(self, tokens, prefix):
            """Full attention gives half of the probability to the last token once more, others a quarter; chunks of
            7 after the first one."""
            yield np.zeros((1, 256), np.float32), None
            again = np.log(1.0 if self.options["attention"] == "full" else 1 / 3)
            for first in range(prefix, len(tokens) - 1, 7):
                last = tokens[first : min(first + 7, len(tokens) - 1)]
                logits = np.full((len(last), 256), np.log(1 / 255), np.float32)
                logits[np.arange(len(last)), last] = again
                moved = None if self.options["attention"] == "full" else "host"
                yield logits, types.SimpleNamespace(backend=moved, hit_rate=0.5, rows_moved=3 * (first + 7 - prefix))

        def forced_attention(self, tokens, prefix):
            """Full attention looks at the last two tokens alone, others attend to the last one. Of the layers
            the first is resident; two heads."""
            cls = type(self)
            cls.watched.append((self.options["attention"], len(tokens) - prefix))
            for n in range(prefix + 1, len(tokens)):
                mass, last = np.zeros((2, n), np.float32), np.zeros((2, n), bool)
                mass[:, -2:], last[:, -1] = (0.25, 0.75), True
                none = Attended(np.zeros(0, np.int32), last[:0])
                if self.options["attention"] == "full":
                    yield (none._replace(mass=mass),) * layers
                else:
                    yield none, *(Attended(np.arange(2), last),) * (layers - 1)

        def describe(self):
            sizes = {"max_context": self.options["max_context"], "dtype": "float32"}
            return sizes | {"resident_heads": [[0, [0, 1]]]}

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    monkeypatch.setitem(sys.modules, "clo_jax.llm", types.SimpleNamespace(LLM=LLM))
    return LLM
