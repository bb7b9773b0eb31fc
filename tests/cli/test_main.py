"""The program as a whole: verbs, versions, exit codes, what goes to which stream."""

import subprocess
import sys

import pytest

from clo_jax.errors import CloError

VERBS = ("convert", "inspect", "doctor", "generate", "chat", "demo", "bench")


def test_help_lists_the_verbs(run):
    result = run("--help")
    assert result.code == 0
    assert all(f" {verb} " in result.out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(run, verb):
    result = run(verb, "--help")
    assert result.code == 0
    assert f"clo-jax {verb}" in result.out


def test_help_does_not_import_jax():
    code = (
        "import sys; from clo_jax.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('jax', 'flax', 'orbax', 'gguf', 'tokenizers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_version(run):
    result = run("--version")
    assert result.code == 0
    names = [line.split()[0] for line in result.out.splitlines()]
    assert names == ["clo-jax", "python", "jax", "jaxlib", "flax", "orbax-checkpoint", "native"]
    assert result.out.splitlines()[-1].endswith(("with CUDA", "without CUDA"))
    assert "headers of jaxlib" in result.out


@pytest.mark.parametrize(
    "args, message",
    [
        (["nonsense"], "No such command"),
        (["generate"], "Missing argument"),
        (["generate", "ckpt", "--prompt", "hi", "--attention", "half"], "'half' is not one of"),
        (["generate", "ckpt", "--prompt", "hi", "--no-such-flag"], "No such option"),
    ],
)
def test_usage_errors_exit_with_2(run, args, message):
    result = run(*args)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    "error, code",
    [
        (CloError("layer 3: no rows"), 1),
        (RuntimeError("layer 3: no rows"), 1),
        (FileNotFoundError("layer 3: no rows"), 1),
        (MemoryError("layer 3: no rows"), 1),
        (ValueError("layer 3:\n  no rows"), 2),
    ],
)
def test_a_failed_run_is_one_line_on_stderr(run, llm, error, code):
    llm.error = error
    result = run("generate", "ckpt", "--prompt", "hi")
    assert result.code == code
    assert result.err == "error: layer 3: no rows\n"
    assert result.out == ""


@pytest.mark.parametrize(
    "args", [["--debug", "generate", "c", "--prompt", "x"], ["generate", "c", "--prompt", "x", "--debug"]]
)
def test_debug_adds_the_traceback(run, llm, args):
    llm.error = CloError("boom")
    result = run(*args)
    assert result.code == 1
    assert "Traceback" in result.err and result.err.endswith("error: boom\n")


def test_an_error_without_text_is_named(run, llm):
    llm.error = MemoryError()
    assert run("generate", "ckpt", "--prompt", "hi").err == "error: MemoryError\n"
