"""The adapter for lm-evaluation-harness, over a stand-in for the harness and a model that always predicts one more."""

import sys
import types

import numpy as np
import pytest

from clo_jax.eval.lm_eval import harness, rolling_windows


class Digits:
    """A token is a digit; 10 begins a text, written <s>."""

    special_tokens = {"bos_token": "<s>"}

    def encode(self, text, add_special_tokens=True):
        own = [10] if add_special_tokens or text.startswith("<s>") else []
        return own + [int(c) for c in text.removeprefix("<s>") if c.isdigit()]

    def token_to_id(self, token):
        return {"<s>": 10}.get(token)

    def render_chat(self, messages, add_generation_prompt=True):
        return "<s>" + "".join(m["content"] for m in messages)

    def digest(self):
        return "digits"


class Model:
    """After digit n comes n + 1 with probability 3/4, another of the ten digits with 1/36 each."""

    tokenizer, max_context = Digits(), 5

    def __init__(self):
        self.forced, self.streamed, self.closed = [], [], 0

    def forced_logits(self, tokens, prefix):
        self.forced.append((list(tokens), prefix))
        for i in range(prefix, len(tokens)):
            row = np.full(11, np.log(1 / 36), np.float32)
            row[10] = -np.inf
            row[(tokens[i - 1] + 1) % 10] = np.log(0.75)
            yield row[None], None

    def stream(self, ids, **options):
        self.streamed.append((ids, options))
        try:
            for text in ("1 2", " 3;", " 4"):
                yield types.SimpleNamespace(text=text)
        finally:
            self.closed += 1


class Hook:
    def __init__(self):
        self.kept = []

    def add_partial(self, kind, args, result):
        self.kept.append((kind, args, result))


@pytest.fixture
def made(monkeypatch):
    class LM:
        def __init__(self):
            self.cache_hook = Hook()

    for name, module in (
        ("lm_eval", types.ModuleType("lm_eval")),
        ("lm_eval.api", types.ModuleType("lm_eval.api")),
        ("lm_eval.api.model", types.SimpleNamespace(LM=LM)),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    found = harness(Model())
    assert isinstance(found, LM)
    return found


def ask(*args):
    return [types.SimpleNamespace(args=args)]


def test_loglikelihood(made):
    likely, other = np.log(0.75), np.log(1 / 36)
    assert made.loglikelihood(ask("12", "34")) == [(pytest.approx(2 * likely), True)]
    assert made.loglikelihood(ask("12", "39")) == [(pytest.approx(likely + other), False)]
    # The last token of the context is decoded, not prefilled.
    assert made.llm.forced == [([10, 1, 2, 3, 4], 2), ([10, 1, 2, 3, 9], 2)]
    assert [kind for kind, _, _ in made.cache_hook.kept] == ["loglikelihood"] * 2
    assert made.loglikelihood(ask("", "12")) == [(pytest.approx(2 * likely), True)]  # 1 follows <s>
    assert made.llm.forced[-1] == ([10, 1, 2], 1)
    assert made.loglikelihood(ask("12", "")) == [(0.0, True)]


def test_a_rendered_chat_begins_once(made):
    context = made.apply_chat_template([{"role": "user", "content": "12"}])
    made.loglikelihood(ask(context, "3"))
    assert made.llm.forced[-1] == ([10, 1, 2, 3], 2)
    assert made.tokenizer_name == "digits"


def test_rolling_loglikelihood_counts_each_token_once(made):
    (found,) = made.loglikelihood_rolling(ask("12345678"))
    # After <s> (id 10) the likely one is 1.
    assert found == pytest.approx(8 * np.log(0.75))
    assert made.llm.forced == [([10, 1, 2, 3, 4], 1), ([4, 5, 6, 7, 8], 1)]


@pytest.mark.parametrize("number", [0, 1, 4, 5, 9, 11])
def test_windows(number):
    ids = list(range(100, 100 + number))
    windows = list(rolling_windows(ids, 10, 5))
    assert [token for _, after in windows for token in after] == ids
    for before, after in windows:
        assert len(before) >= 1 and len(before) + len(after) <= 5
    if number > 4:  # the last one reaches back as far as there is room
        assert len(windows[-1][0]) + len(windows[-1][1]) == 5


def test_generate_until(made):
    assert made.generate_until(ask("12", {"until": [";", "4"]})) == ["1 2 3"]
    assert made.llm.streamed[0] == ([10, 1, 2], {"max_new_tokens": 256}) and made.llm.closed == 1
    assert made.generate_until(ask("1", {"until": "2", "max_gen_toks": 7})) == ["1 "]
    options = {"do_sample": True, "temperature": 0.5, "top_p": 0.9}
    assert made.generate_until(ask("1", options)) == ["1 2 3; 4"]
    assert made.llm.streamed[2][1] == {"max_new_tokens": 256, **options}


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(RuntimeError, match=r"pip install 'clo-jax\[lm-eval\]'"):
        harness(Model())


def test_a_checkpoint_without_tokenizer_is_refused(made):
    with pytest.raises(ValueError, match="llm: got a checkpoint without tokenizer.json"):
        harness(types.SimpleNamespace(tokenizer=None))
