"""Published head scores: shapes, clipping, errors that name file and line."""

import numpy as np
import pytest

from clo_jax.calibrate.duo_scores import read_duo_scores
from clo_jax.errors import CheckpointError
from tests import tiny


def write(folder, text):
    path = folder / "full_attention_heads.tsv"
    path.write_text(text)
    return path


def test_kv_heads_and_query_heads_by_shape(tmp_path):
    kv = read_duo_scores(write(tmp_path, "0.5\t1.0\n-9.25e-05\t1.001\n0\t0.25\n"), tiny.LLAMA)
    np.testing.assert_allclose(kv.scores, [[0.5, 1], [0, 1], [0, 0.25]])
    assert (kv.scores.dtype, kv.source) == (np.float32, "duo-attention file")
    query = read_duo_scores(
        write(tmp_path, "\t".join("123456") + "\n" + "\t".join("000000") + "\n" + "1 " * 6), tiny.LLAMA
    )
    assert query.scores.shape == (3, 6)


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "got no scores"),
        ("1\t2\n3\n", "line 2: got 1 values, wanted 2 as above"),
        ("1\tx\n", "line 1: could not convert string to float: 'x'"),
        ("1\tnan\n", "line 1: got a value that is not finite"),
        ("1\t0\n1\t0\n", r"scores: got shape \(2, 2\), wanted \(3, 6\) or \(3, 2\)"),
        ("1\t0\t1\n" * 3, r"scores: got shape \(3, 3\), wanted \(3, 6\) or \(3, 2\)"),
    ],
)
def test_errors_name_file_and_line(tmp_path, text, named):
    with pytest.raises(CheckpointError, match=f"full_attention_heads.tsv.*{named}"):
        read_duo_scores(write(tmp_path, text), tiny.LLAMA)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="none.tsv: cannot be read: No such file"):
        read_duo_scores(tmp_path / "none.tsv")
