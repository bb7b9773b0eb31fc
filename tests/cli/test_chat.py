"""clo-jax chat: history, cancelling, refusal of a history that does not fit."""

import builtins

import pytest

from clo_jax.cli.chat import converse


def lines(*items):
    source = iter([*items, None])
    return lambda: next(source)


def prompts(llm):
    return [call[1] for call in llm.calls if call[0] == "stream"]


def test_answers_become_history(llm, capsys):
    model = llm.load("ckpt")
    converse(model, "be kind", {"max_new_tokens": 4}, lines("hello", "  ", "more", "/quit", "never asked"))
    first = model.tokenizer.encode("system be kind user hello")
    second = first + model.tokenizer.encode("assistant all is well user more")
    assert prompts(llm) == [first, second]
    assert capsys.readouterr().out == "all is well\nall is well\n"


def test_ctrl_c_cancels_the_answer_and_keeps_the_conversation(llm, capsys):
    llm.interrupt = True
    model = llm.load("ckpt")

    def read():
        llm.interrupt = len(prompts(llm)) == 0
        return script()

    script = lines("first", "second")
    converse(model, None, {"max_new_tokens": 4}, read)
    assert prompts(llm) == [model.tokenizer.encode("user first"), model.tokenizer.encode("user second")]
    captured = capsys.readouterr()
    assert captured.out == "all is\nall is well\n"
    assert "cancelled" in captured.err
    assert llm.calls.count(("closed",)) == 2


def test_a_history_that_does_not_fit_is_refused_with_the_numbers(llm, capsys):
    model = llm.load("ckpt")
    converse(model, None, {"max_new_tokens": 30}, lines("word " * 40, "short"))
    assert prompts(llm) == [model.tokenizer.encode("user short")]
    assert (
        "refused: the conversation has 41 tokens and the answer may take 30, together 71; the context holds 64"
        in capsys.readouterr().err
    )


def test_command(run, llm, monkeypatch):
    asked = iter(["hello"])

    def fake_input():
        try:
            return next(asked)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", fake_input)
    result = run("chat", "ckpt", "--sparsity", "0.2", "--max-new-tokens", "9", "--do-sample", "--top-p", "0.5")
    assert (result.code, result.out) == (0, "all is well\n")
    assert "/quit leaves" in result.err
    (load,) = [call[-1] for call in llm.calls if call[0] == "load"]
    assert load["clo"].sparsity == 0.2
    (options,) = [call[-1] for call in llm.calls if call[0] == "stream"]
    assert options == {"do_sample": True, "seed": 0, "top_p": 0.5, "max_new_tokens": 9}


@pytest.mark.parametrize("without", ["tokenizer", "template"])
def test_needs_a_chat_template(run, llm, without):
    llm.tokenizer = None if without == "tokenizer" else type(llm.tokenizer)(has_chat_template=False)
    result = run("chat", "ckpt")
    assert result.code == 2
    assert "CKPT: got ckpt, which has no chat template" in result.err
