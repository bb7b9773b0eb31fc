"""The packed form computes what the plain one does, rung by rung, and is made without a second copy of the weights."""

import dataclasses
import functools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import generate as gen
from clo_jax import models
from clo_jax.bench import layer as layer_bench
from clo_jax.bench.subject import Subject
from clo_jax.config import CloConfig
from clo_jax.llm import LLM
from clo_jax.models import packed
from tests import tiny, tiny_checkpoint
from tests.compare import assert_close
from tests.models import forward
from tests.models import tiny as recorded

CLO = CloConfig(sparsity=0.2, hash_bits=64, recent_tokens=16, flush_tokens=8)
UNTIED = dataclasses.replace(tiny.LLAMA, tie_word_embeddings=False)
CONFIGS = {"llama-tied": tiny.LLAMA, "llama-untied": UNTIED, "qwen2-tied": tiny.QWEN}
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about devices or programs of a CPU")
NOTHING = jnp.zeros((0,), jnp.int32)


@pytest.fixture
def packs(monkeypatch):
    """Packing pays wherever the tests run."""
    monkeypatch.setattr(packed, "FASTER_ON", (jax.default_backend(),))


def both(config, dtype=jnp.float32):
    """The same parameters plain and packed."""
    plain = tiny.params(config, dtype=dtype)
    return plain, models.pack(plain, keep=True)


# --- numbers ----------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def rungs(config, params, x):
    """Every public step of the first layer, each from x [B, N, hidden], so that no error is carried on."""
    model = models.merge(config, params)
    layer = models.merge_layer(config, params["layers"][0])
    position = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    rope = model.rope(position, position[:, -1] + 1)
    q, k, v = layer.attn(x)
    heads = q.reshape(*q.shape[:-1], -1, config.head_dim)
    return {
        "q": q, "k": k, "v": v, "o": layer.attn.o(q), "mlp": layer.mlp(x), "query": layer.query(x, rope),
        "qkv": layer.qkv(x, rope), "add_attention": layer.add_attention(x, heads), "add_mlp": layer.add_mlp(x),
        "finish": layer.finish(x, heads), "logits": model.logits(x),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", recorded.MODELS)
def test_projections_layers_and_logits_are_equal(name, dtype):
    config = models.config_from_hf(recorded.MODELS[name])
    plain = jax.tree.map(lambda x: jnp.asarray(x, dtype), recorded.params(recorded.MODELS[name]))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, config.hidden_size)), dtype)
    want, got = rungs(config, plain, x), rungs(config, models.pack(plain, keep=True), x)
    for rung in want:
        for one, other in zip(jax.tree.leaves(got[rung]), jax.tree.leaves(want[rung]), strict=True):
            # Sums in another order differ by more where the values are larger than one.
            size = jnp.maximum(jnp.abs(other).max(), 1).astype(other.dtype)
            assert_close(one / size, other / size, dtype, f"{name}: {rung}")


@pytest.mark.parametrize("name", ["llama-untied-g3", "llama-tied-g1-bias-linear", "qwen2-untied-g5"])
def test_a_whole_run_is_equal(name):
    config, plain = models.config_from_hf(recorded.MODELS[name]), recorded.params(recorded.MODELS[name])
    want = forward.run(config, plain, recorded.prompt(), recorded.NEW)
    got = forward.run(config, models.pack(plain), recorded.prompt(), recorded.NEW)
    for rung in want:
        np.testing.assert_allclose(got[rung], want[rung], rtol=0, atol=1e-4, err_msg=rung)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_prefill_and_decode_logits_are_equal(config, dtype):
    policy, prompts = tiny.full_policy(config, 2, 64, jnp.dtype(dtype).name), [tiny.prompt(33, s) for s in (0, 1)]
    step = jax.jit(gen.decode_step, static_argnums=(0, 1))
    lengths, tables, found = jnp.array([33, 20], jnp.int32), policy.tables(), []
    for params in both(config, dtype):
        start = gen.prefill(config, policy, params, tables, jnp.asarray(prompts, jnp.int32), lengths, gen.JITTED)
        limits = gen.Limits(jnp.full((2,), 9, jnp.int32), NOTHING)
        state, logits = gen.begin(*start, lengths, None, limits), [start[2]]
        for token in (7, 200, 31):
            state = state._replace(token=jnp.full((2,), token, jnp.int32))
            made, state = step(config, policy, params, tables, state)
            logits.append(made)
        found.append(jnp.stack(logits))
    assert_close(found[1], found[0], dtype)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokens_are_equal(config):
    plain, made = both(config)
    prompts = [tiny.prompt(70), tiny.prompt(33, seed=1)]
    with tiny.clo_policy(config, CLO, 2, 128) as (policy, engine):
        want, got = (tiny.run(config, params, policy, engine, prompts, 20).tokens for params in (plain, made))
        # The first run of a program goes without a transfer kernel beside it, also when the engine has served others.
        assert len(engine._programs) == 2
    assert got == want
    policy = tiny.full_policy(config, 1, 128)
    args = policy.tables(), jnp.asarray(prompts[:1], jnp.int32), jnp.array([70], jnp.int32), NOTHING
    want, got = (gen.generate(config, policy, 9, params, *args)[0].tolist() for params in (plain, made))
    assert got == want


# --- who packs ----------------------------------------


def test_an_llm_packs_and_answers_the_same(tmp_path, monkeypatch, packs):
    path = tiny_checkpoint.write_checkpoint(tmp_path)
    answers, forms = [], []
    for backends in (packed.FASTER_ON, ()):
        monkeypatch.setattr(packed, "FASTER_ON", backends)
        with LLM.load(path, clo=CLO, max_context=128, chunk_tokens=4) as llm:
            answers.append(llm.generate("the cat sat", max_new_tokens=8, ignore_eos=True)[0].token_ids)
            forms.append(packed.form_of(llm._params))
    assert answers[0] == answers[1] and forms == [packed.PACKED, packed.PLAIN]


def test_benches_measure_packed_parameters(tmp_path, packs):
    config = dataclasses.replace(UNTIED, num_layers=2)
    assert packed.form_of(Subject("tiny", config, "float32", "random", True).params()) is packed.PACKED
    widest = max(config.vocab_size, config.num_heads * config.head_dim)  # heads are wider where a GPU runs the tests
    assert models.packing_bytes(config, 4) == 4 * config.hidden_size * widest
    with layer_bench.bench(config, CLO, context=256, steps=4, dtype="float32") as made:
        assert packed.form_of(made.params) is packed.PACKED and made.products(1)[0] > 0


def test_it_pays_on_a_gpu(monkeypatch):
    plain = tiny.params(tiny.LLAMA)
    for backend, wanted in (("cpu", packed.PLAIN), ("gpu", packed.PACKED)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert packed.form_of(models.for_decoding(plain, keep=True)) is wanted
        assert (models.packing_bytes(tiny.LLAMA, 2) > 0) == (backend == "gpu")


# --- packing ----------------------------------------


@pytest.mark.parametrize("name", ["llama-tied-g1-bias-linear", "llama-untied-g3", "qwen2-untied-g5"])
def test_the_nesting_is_that_of_the_packed_modules(name):
    config = models.config_from_hf(recorded.MODELS[name])
    made = models.pack(recorded.params(recorded.MODELS[name]))  # NumPy's
    abstract = models.build(config, jnp.dtype(jnp.float32), packed.PACKED)[1]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)


def test_memory_is_freed_kernel_by_kernel(monkeypatch):
    """Beside the parameters there is never more than the kernel that is being made."""
    join, plain, extra = packed._join, tiny.params(dataclasses.replace(UNTIED, qkv_bias=True)), []
    sources = jax.tree.leaves(plain)
    sizes = {id(leaf): leaf.nbytes for leaf in sources}
    made = []

    def counted(*arrays):
        made.append(join(*arrays))
        held = sum(sizes[id(leaf)] for leaf in sources if not leaf.is_deleted()) + sum(a.nbytes for a in made)
        extra.append(held - sum(sizes.values()))
        return made[-1]

    monkeypatch.setattr(packed, "_join", counted)
    result = models.pack(plain)
    assert len(made) == 3 * 6 + 1 and max(extra) == max(a.nbytes for a in made)
    # What is not joined is shared: norms, the embedding, the query's bias.
    alive = {id(leaf) for leaf in sources if not leaf.is_deleted()}
    assert alive == {id(leaf) for leaf in jax.tree.leaves(result)} - {id(a) for a in made}
    for leaf in ("input_norm", "post_norm"):
        assert result["layers"][0][leaf] is plain["layers"][0][leaf]
    assert result["embed"]["embedding"] is plain["embed"]["embedding"]


@on_cpu
def test_joining_needs_no_memory_of_its_own(fresh_programs):
    half = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    compiled = packed._join.lower(half, half).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 256 * 512 * 4


def test_kept_parameters_stay():
    plain, _ = both(tiny.QWEN)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(plain))


def test_packing_twice_and_other_nestings_are_refused():
    plain, made = both(tiny.LLAMA)
    with pytest.raises(ValueError, match="params: got packed parameters, wanted plain ones"):
        models.pack(made)
    mixed = plain | {"layers": plain["layers"] | {1: made["layers"][1]}}
    with pytest.raises(ValueError, match="params: got packed parameters"):
        models.pack(mixed)
    fused = {"attn": {"qkv": 0, "o": 0}, "mlp": plain["layers"][0]["mlp"]}
    message = r"params: got a layer with \{'attn': \['o', 'qkv'\], 'mlp': \['down', 'gate', 'up'\]\}, wanted \{'attn'"
    for refused in (
        lambda: models.pack(plain | {"layers": {0: fused}}),
        lambda: models.merge(tiny.LLAMA, plain | {"layers": {0: fused}}),
        lambda: models.merge_layer(tiny.LLAMA, fused),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    with pytest.raises(ValueError, match=r"params: got \['embed'\], wanted layers among them"):
        models.pack({"embed": plain["embed"]})
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(plain))


TWO_DEVICES = """
import jax, numpy as np
from clo_jax import models
from tests.models import tiny
mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
plain = tiny.params(tiny.MODELS["qwen2-untied-g5"])
rows, columns = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*p)) for p in (("tp",), (None, "tp")))
for wide in (rows, columns):
    placed = jax.tree.map(lambda x: jax.device_put(x, wide if x.ndim == 2 else rows), plain)
    got, want = models.pack(placed), models.pack(plain)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(got))
print("same")
"""


@on_cpu
def test_arrays_of_two_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    command, root = [sys.executable, "-c", TWO_DEVICES], pathlib.Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert found.stdout == "same\n", found.stderr


# --- the compiled step ----------------------------------------


def moved(text, sizes):
    """Instructions of a compiled program, inside fusions too, that lay out anew as many elements as a kernel has."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?\S+ = \w+\[([\d,]*)\]\S* (copy|transpose|slice|concatenate)\(", line)
        if match and np.prod([int(n) for n in match[1].split(",") if n], dtype=int) in sizes:
            found.append(line.strip())
    return found


# On a CPU XLA computes bfloat16 in float32, from widened kernels that it transposes as it makes them.
@on_cpu
@pytest.mark.parametrize("config", [UNTIED, tiny.QWEN], ids=["llama-untied", "qwen2"])
def test_a_decode_step_copies_no_kernel(config, fresh_programs):
    config = dataclasses.replace(config, vocab_size=509, intermediate_size=211)  # sizes that nothing else has
    plain, params = both(config)
    # A slice of a joined kernel has the size of a plain one.
    sizes = {leaf.size for leaf in jax.tree.leaves((plain, params)) if leaf.ndim == 2}
    with tiny.clo_policy(config, CLO, 1, 128) as (policy, _):
        tables, lengths = policy.tables(), jnp.array([40], jnp.int32)
        tokens = jnp.asarray([tiny.prompt(40)], jnp.int32)
        start = gen.prefill(config, policy, params, tables, tokens, lengths, gen.JITTED)
        limits = gen.Limits(jnp.full((1,), 9, jnp.int32), NOTHING)
        state = gen.begin(*start, lengths, None, limits)
        program = gen.decode_chunk_jitted.lower(config, policy, 4, True, params, tables, state, None, limits)
        text = program.compile().as_text()
    assert " dot(" in text
    assert moved(text, sizes) == []


@on_cpu
def test_the_check_sees_a_copied_kernel(fresh_programs):
    x, kernel = jnp.ones((1, 48)), jnp.ones((48, 80))
    text = jax.jit(lambda x, k: x @ jax.lax.optimization_barrier(jnp.copy(k.T)).T).lower(x, kernel).compile().as_text()
    assert moved(text, {kernel.size})
