"""What a native benchmark prints becomes rows of a results file; what it complains of does not."""

import json

import pytest

from clo_jax.bench import native, report

LOG = "pull\t50.7\tGB/s\tcudaMemcpyAsync\t55.28\t>= 0.90\npost\t11\tus\t-\t0\t-\n"


def test_lines_become_rows():
    pull, post = native.rows(LOG)
    assert pull == report.Row("pull", 50.7, "GB/s", "cudaMemcpyAsync", 55.28, ">= 0.90")
    assert post == report.Row("post", 11.0, "us")


def test_the_file_is_valid_and_names_the_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CLO_JAX_COMMIT", "0123456789ab")
    (tmp_path / "pull.log").write_text(LOG)
    native.main("pull", str(tmp_path / "out.json"), str(tmp_path / "pull.log"))
    content = json.loads((tmp_path / "out.json").read_text())
    report.validate(content)
    assert content["commit"] == "0123456789ab" and content["what"] == "pull" and content["rows"][0]["met"]
    assert "| pull | 50.7 GB/s |" in capsys.readouterr().out


def test_text_for_people_is_no_figure():
    assert len(native.rows("kernels of a layer\n" + LOG + "all checks passed\n")) == 2


@pytest.mark.parametrize("log", ["pull\t1\tGB/s\n", "layer 0, backend pull: not posted in time\n", ""])
def test_a_log_without_figures_is_refused(log):
    with pytest.raises(ValueError, match="log: got"):
        native.rows(log)
