"""The bench of row formats, on a tiny checkpoint: every format is measured, and finer scales err less."""

import json

import jax.numpy as jnp
import numpy as np

from clo_jax.bench import quantized_rows as bench
from clo_jax.bench import report
from clo_jax.ops.quantized_rows import LARGEST, dequantize, quantize
from tests import tiny_checkpoint


def test_a_results_file(tmp_path):
    out, checkpoint = tmp_path / "out.json", tiny_checkpoint.write_checkpoint(tmp_path)
    bench.main([str(checkpoint), "--tokens", "128", "--out", str(out)])
    content = json.loads(out.read_text())
    report.validate(content)
    errors = {row["name"]: row["value"] for row in content["rows"]}
    assert len(errors) == 2 * 2 * 5 and content["args"]["checkpoint"] == checkpoint.name
    for what in ("keys", "values"):
        shared = ("int8", "4 groups"), ("int8", "1 group"), ("fp8", "4 groups")
        some, one, fp8 = (errors[f"{kind}, {what}, a scale for {n} of channels of a token"] for kind, n in shared)
        assert 0 < some < one < fp8


def test_the_product_s_format_is_four_groups():
    """But for scales, which the product rounds up to eight bits."""
    x = np.random.default_rng(0).normal(size=(3, 2, 5, 2, 64)).astype(np.float32)
    for kind in LARGEST:
        product = np.asarray(dequantize(quantize(jnp.asarray(x), kind), kind))
        assert 0.9 < bench.error(x, product) / bench.error(x, bench.by_groups(x, kind, 4)) < 1.1
