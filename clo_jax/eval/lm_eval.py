"""lm-evaluation-harness over an `LLM`: every task of the harness, on the cache that is in question.

    from clo_jax.eval.lm_eval import harness
    with clo_jax.LLM.load("my-model", clo=clo_jax.CloConfig(sparsity=0.1)) as llm:
        results = lm_eval.simple_evaluate(model=harness(llm), tasks=["hellaswag"])

Nothing is cut: a request that does not fit the context is an error.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from clo_jax.llm import LLM

_NEW_TOKENS = 256  # where a task does not say


def harness(llm: LLM) -> Any:
    """The model as the harness wants it, an `lm_eval.api.model.LM`.

    Raises:
      RuntimeError: lm-eval is not installed.
      ValueError: the checkpoint has no tokenizer.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise RuntimeError("lm-eval is not installed: pip install 'clo-jax[lm-eval]'") from None
    if llm.tokenizer is None:
        raise ValueError("llm: got a checkpoint without tokenizer.json, wanted one with it")
    made = type("CloJax", (_Requests, LM), {})()
    made.llm = llm
    return made


class _Requests:
    """The three kinds of requests. A request's `args`: (context, continuation), (text,) or (context, options)."""

    llm: LLM

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each: log-probability of the continuation, and whether it is what greedy decoding gives. Tokens of the
        context but the last are prefilled; from there on the policy decodes."""
        found = []
        for request in requests:
            context, continuation = request.args
            # Blanks at the end of the context belong to the continuation's first word.
            bare = context.rstrip()
            whole = self._encode(context + continuation)
            before = self._encode(bare) if bare else [self._first_token()]
            if not bare:
                after = self.llm.tokenizer.encode(context + continuation, add_special_tokens=False)
                after = after[1:] if after[:1] == before else after
            else:
                after = whole[len(before) :]
            found.append(self._score(before, after))
            self.cache_hook.add_partial("loglikelihood", request.args, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """For each: log-probability of a text, every token decoded. A text that is longer than the context is scored
        in windows, each token once; the last window reaches back as far as the context does."""
        found = []
        for request in requests:
            ids = self.llm.tokenizer.encode(request.args[0], add_special_tokens=False)
            windows = rolling_windows(ids, self._first_token(), self.llm.max_context)
            found.append(sum(self._score(before, after)[0] for before, after in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """For each: the answer, up to the first of the texts that end it."""
        found = []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            sampling = {}
            if options.get("do_sample"):
                given = {name: options.get(name) for name in ("temperature", "top_k", "top_p")}
                sampling = {"do_sample": True, **{name: value for name, value in given.items() if value is not None}}
            stream = self.llm.stream(
                self._encode(context), max_new_tokens=options.get("max_gen_toks", _NEW_TOKENS), **sampling
            )
            text = ""
            for delta in stream:
                text += delta.text
                if any(end in text for end in until):
                    stream.close()
                    break
            found.append(min((text.split(end, 1)[0] for end in until), key=len, default=text))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def apply_chat_template(self, chat_history: Sequence[Any], add_generation_prompt: bool = True) -> str:
        return self.llm.tokenizer.render_chat(chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches."""
        return self.llm.tokenizer.digest()

    def _encode(self, text: str) -> list[int]:
        """A rendered chat brings its own beginning."""
        first = self.llm.tokenizer.special_tokens.get("bos_token")
        return self.llm.tokenizer.encode(text, add_special_tokens=not (first and text.startswith(first)))

    def _first_token(self) -> int:
        """What stands before a text without context: the beginning-of-text token, else the end-of-text one."""
        names = self.llm.tokenizer.special_tokens
        for name in ("bos_token", "eos_token"):
            if name in names and (token := self.llm.tokenizer.token_to_id(names[name])) is not None:
                return token
        raise ValueError("loglikelihood: got no context, and the tokenizer has neither bos_token nor eos_token")

    def _score(self, before: list[int], after: list[int]) -> tuple[float, bool]:
        if not after:
            return 0.0, True
        ids = [*before, *after]
        # The last token of the context is decoded too, so that the policy predicts even the first one that counts.
        prefix = max(len(before) - 1, 1)
        rows = itertools.chain.from_iterable(logits for logits, _ in self.llm.forced_logits(ids, prefix))
        total, greedy = 0.0, True
        for row, token in zip(itertools.islice(rows, len(before) - prefix, None), after, strict=True):
            row = row.astype(np.float64)
            top = row.max()
            total += row[token] - top - np.log(np.exp(row - top).sum())
            greedy = greedy and int(row.argmax()) == token
        return float(total), greedy


def rolling_windows(ids: Sequence[int], first: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, tokens to predict) until each token is predicted once, both together at most `size` tokens. Every
    window has one token of context, the first one `first`; the last one as many as fit."""
    each = size - 1
    for start in range(0, len(ids), each):
        end = min(start + each, len(ids))
        reach = max(end - size, 0) if start else 0
        yield (list(ids[reach:start]) if start else [first]), list(ids[start:end])
