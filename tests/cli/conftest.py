"""Runs the command line in this process, with a small fake in place of the model."""

import dataclasses
import sys
import types

import pytest

from clo_jax.cli import main


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*args) -> Result; the terminal is wide, so that no line is broken."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str) -> Result:
        with pytest.raises(SystemExit) as exit:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(exit.value.code or 0, captured.out, captured.err)

    return call


@dataclasses.dataclass(frozen=True)
class FakeMetrics:
    attention: str = "clo"
    ttft_s: float = 0.5
    tpot_s: float | None = 0.1
    device_kv_bytes: int = 2048
    host_kv_bytes: int = 1 << 20
    device_kv_parts: dict = dataclasses.field(default_factory=lambda: {"tail rows": 512, "selected rows": 1536})
    backend: str | None = "host"
    retriever: str | None = "sign"
    head_scores: str | None = "neutral"
    planner: str | None = "none"
    resident_heads: int | None = 8
    kv_dtype: str | None = "auto"
    hit_rate: float | None = 0.5
    rows_moved: int = 40
    bytes_moved: int = 40 * 512
    rows_selected: int = 160


@dataclasses.dataclass(frozen=True)
class FakeGeneration:
    text: str
    token_ids: list
    finish_reason: str
    prompt_tokens: int
    metrics: FakeMetrics

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True)
class FakeDelta:
    row: int
    text: str
    token_ids: list
    finish_reason: str | None = None
    metrics: FakeMetrics | None = None


class FakeTokenizer:
    """A token is a word; its id is its length."""

    def __init__(self, has_chat_template=True, answers=()):
        self.has_chat_template = has_chat_template
        self.answers = dict(answers)

    def encode(self, text):
        return [len(word) for word in text.split()]

    def encode_chat(self, messages):
        return [token for message in messages for token in self.encode(message["role"] + " " + message["content"])]

    def decode(self, ids):
        return self.answers[tuple(ids)]


class FakeLLM:
    """Answers everything with "all is well"; remembers what it was given. Class attributes are set by tests."""

    calls: list = []
    tokenizer: FakeTokenizer | None = FakeTokenizer()
    interrupt = False
    error: BaseException | None = None
    answer = ("all is well", [3, 2, 4])
    max_context = 64

    @classmethod
    def load(cls, path, **options):
        cls.calls.append(("load", path, options))
        if cls.error is not None:
            raise cls.error
        return cls()

    def generate(self, prompt, callback=None, **options):
        self.calls.append(("generate", prompt, options))
        text, ids = self.answer
        if callback is not None:
            callback(FakeDelta(0, text, ids))
        return [FakeGeneration(text, ids, "stop", 7, FakeMetrics())]

    def stream(self, prompt, **options):
        self.calls.append(("stream", prompt, options))
        try:
            yield FakeDelta(0, "all is", [3, 2])
            if self.interrupt:
                raise KeyboardInterrupt
            yield FakeDelta(0, " well", [4], "stop", FakeMetrics())
        finally:
            self.calls.append(("closed",))

    def describe(self):
        return {"checkpoint": "ckpt", "stop_token_ids": [2]}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.calls.append(("close",))


@pytest.fixture
def llm(monkeypatch):
    """A fresh subclass of the fake, in place of clo_jax.llm.LLM."""
    fake = type("LLM", (FakeLLM,), {"calls": []})
    monkeypatch.setitem(sys.modules, "clo_jax.llm", types.SimpleNamespace(LLM=fake))
    return fake
