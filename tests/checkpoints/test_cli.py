"""`clo-jax convert` and `clo-jax inspect`: results on stdout, everything else on stderr, exit codes."""

import json
import subprocess
import sys

import pytest

from clo_jax.cli import main
from tests.checkpoints import builders


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*args) -> (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args):
        with pytest.raises(SystemExit) as exit:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return exit.value.code or 0, captured.out, captured.err

    return call


def test_convert_and_inspect(run, source, tmp_path):
    code, out, err = run("convert", source, tmp_path / "out", "--verify")
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith(f"{tmp_path / 'out'}: llama, 30 tensors, ")
    assert second.startswith("verified: 30 tensors equal the source; logits differ by at most ")
    code, out, err = run("inspect", tmp_path / "out")
    assert (code, err) == (0, "")
    shown = {line[:22].strip(): line[22:].strip() for line in out.splitlines()}
    for wanted in ("4 query, 2 key/value, 16 wide", "2 </s>, 5 #", "absent", "untied", "base 10000, default"):
        assert any(value.startswith(wanted) or wanted in value for value in shown.values()), (wanted, out)


def test_inspect_json(run, source, checkpoint):
    code, out, err = run("inspect", checkpoint, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    config = builders.config()
    values = builders.tensors(config)
    assert found["num_parameters"] == sum(value.size for value in values.values())
    assert found["num_tensors"] == len(values)
    assert found["parameter_bytes"] == 4 * found["num_parameters"]
    assert found["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, float32
    assert [token["id"] for token in found["stop_tokens"]] == [2, 5]
    assert found["stop_tokens"][0]["text"] == "</s>"
    assert found["architecture"]["num_layers"] == 3
    assert (found["calibration"], found["tokenizer"], found["chat_template"]) == (False, True, False)
    assert found["source"]["kind"] == "safetensors"
    assert set(found["source"]["sha256"]) == {"config.json", "model.safetensors"}


def test_convert_json_and_dtype(run, source, tmp_path):
    code, out, err = run("convert", source, tmp_path / "out", "--dtype", "bfloat16", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["dtype"] == "bfloat16" and found["verification"] is None and found["path"] == str(tmp_path / "out")


def test_tokenizer_options(run, tmp_path):
    config = builders.config()
    file = builders.write_gguf(tmp_path / "m.gguf", config, builders.tensors(config), pre="tekken")
    code, out, err = run("convert", file, tmp_path / "out")
    assert code == 1 and out == "" and "tokenizer.ggml.pre: got 'tekken'" in err and "--tokenizer" in err
    assert run("convert", file, tmp_path / "out", "--no-tokenizer")[0] == 0
    builders.train_tokenizer().save(str(tmp_path / "own.json"))
    assert run("convert", file, tmp_path / "out", "--tokenizer", tmp_path / "own.json", "--force")[0] == 0
    code, out, _ = run("inspect", tmp_path / "out", "--json")
    assert json.loads(out)["tokenizer"] is True


def test_notes_go_to_stderr_and_can_be_silenced(run, tmp_path):
    config = builders.config()
    folder = builders.write_folder(tmp_path / "m", config, builders.tensors(config), tokenizer=False)
    code, out, err = run("convert", folder, tmp_path / "loud")
    assert code == 0 and "token ids only" in err and "token ids only" not in out
    assert run("convert", folder, tmp_path / "quiet", "--quiet")[2] == ""


def test_exit_codes(run, source, checkpoint, tmp_path):
    assert run("convert", source, checkpoint)[0] == 1
    assert run("convert", tmp_path / "nothing", tmp_path / "out")[0] == 1
    assert run("inspect", tmp_path)[0] == 1
    assert run("convert", source)[0] == 2
    assert run("convert", source, tmp_path / "out", "--dtype", "int8")[0] == 2
    assert run("convert", source, tmp_path / "out", "--tokenizer", "x", "--no-tokenizer")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_the_program_prints_no_warning(source, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            "from clo_jax.cli import main; main()",
            "convert",
            source,
            tmp_path / "out",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
