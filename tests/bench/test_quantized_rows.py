"""The bench of row formats, on a tiny checkpoint: every format is measured, and finer scales err less."""

import json

import jax.numpy as jnp
import numpy as np

from clo_jax.bench import quantized_rows as bench
from clo_jax.bench import report
from clo_jax.ops.quantized_rows import dequantize, quantize


def test_a_results_file(checkpoint, tmp_path):
    out = tmp_path / "out.json"
    bench.main([str(checkpoint), "--tokens", "128", "--out", str(out)])
    content = json.loads(out.read_text())
    report.validate(content)
    errors = {row["name"]: row["value"] for row in content["rows"]}
    assert len(errors) == 2 * 2 * 5 and content["args"]["checkpoint"] == checkpoint.name
    for what in ("keys", "values"):
        several, one = (
            errors[f"int8, {what}, a scale for {n} of channels of a token"] for n in ("4 groups", "1 group")
        )
        assert 0 < several < one < errors[f"fp8, {what}, a scale for 4 groups of channels of a token"]


def test_the_product_s_format_is_four_groups():
    """But for scales, which the product rounds up to eight bits."""
    x = np.random.default_rng(0).normal(size=(3, 2, 5, 2, 16)).astype(np.float32)
    for kind in bench.LARGEST:
        product = np.asarray(dequantize(quantize(jnp.asarray(x), kind), kind))
        assert 0.9 < bench.error(x, product) / bench.error(x, bench.by_groups(x, kind, 4)) < 1.2
