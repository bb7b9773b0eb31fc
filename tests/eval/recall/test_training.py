import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import checkpoints
from clo_jax.eval.recall import chains, folder, training
from clo_jax.llm import LLM
from clo_jax.models import random_params

SMALL = dataclasses.replace(
    training.model_config(), hidden_size=32, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=16, max_position_embeddings=512,
)  # fmt: skip
PHASES = (
    training.Phase(4, 2, 1, 50, enough=0.0, hops=2, limit=128),  # ends after its first steps
    training.Phase(6, 2, 2, 50, enough=2.0, hops=2, limit=256),
)


def test_phases_end_early_and_the_loss_falls():
    seen = []
    params = training.train(SMALL, training.Settings(PHASES, rate=1e-2), seen.append)
    assert [(one.phase, one.step) for one in seen] == [(0, 25), (1, 25), (1, 50)]
    assert seen[2].loss < seen[1].loss
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_the_model_is_small_and_of_the_qwen_architecture():
    config = training.model_config()
    shapes = jax.eval_shape(lambda: random_params(config, jax.random.key(0), jnp.bfloat16))
    assert config.architecture == "qwen2" and config.qkv_bias and config.group == 5
    assert sum(2 * leaf.size for leaf in jax.tree.leaves(shapes)) < 12e6
    assert config.max_position_embeddings >= 131072 + chains.num_answer_tokens(16)


def test_the_checkpoint_answers_as_the_trained_model(tmp_path):
    params = random_params(SMALL, jax.random.key(1), jnp.bfloat16)
    result = folder.write(SMALL, params, tmp_path / "model")
    config, loaded, _ = checkpoints.load_checkpoint(result.path, dtype="float32")
    assert config == SMALL
    asked = chains.question(0, 80, 2)
    tokens = jnp.array([asked.ids], jnp.int32)
    logits = training.forward(SMALL, params, tokens, jnp.arange(len(asked.ids), dtype=jnp.int32)[None], 10)
    with LLM.load(result.path, attention="full", dtype="float32", max_context=128) as llm:
        answer = llm.generate(asked.ids, max_new_tokens=1)[0]
        assert llm.tokenizer.decode(asked.ids[:3]).split() == ["<begin>", "<key>", chains.NAMES[asked.ids[2]]]
    assert answer.token_ids == [int(jnp.argmax(logits[0, -1]))]


def test_a_folder_that_is_there_is_not_touched(tmp_path):
    params = random_params(SMALL, jax.random.key(1), jnp.bfloat16)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine").write_text("kept")
    with pytest.raises(Exception, match="model"):
        folder.write(SMALL, params, tmp_path / "model")
    assert (tmp_path / "model/mine").read_text() == "kept"
