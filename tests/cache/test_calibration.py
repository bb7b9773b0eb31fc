"""The calibration folder: round trip, partial updates, and refusal of what is cut, changed or of another model."""

import dataclasses
import json

import numpy as np
import pytest

from clo_jax.cache import calibration as cal
from clo_jax.cache.calibration_parts import Choice, Costs, HashWeights, Importance, Similarity, Trace
from clo_jax.errors import CheckpointError
from tests.tiny import LLAMA

L, H, K, D = LLAMA.num_layers, LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim
FROM = {"seed": 3, "checkpoint_sha256": "ab"}


def rand(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0, 1, shape).astype(np.float32)


def every_part():
    similarity = Similarity(*(rand(L, K, seed=i) for i in range(8)), settings={"sim_threshold": 0.8})
    trace = Trace(
        rand(2, 5, L, K) > 0.5,
        np.arange(2 * 5 * L * K, dtype=np.int32).reshape(2, 5, L, K),
        np.full((2, 5), 12, np.int32),
        np.array([100, 120], np.int32),
    )
    return (
        Importance(rand(L, H), "gates"),
        HashWeights("sign", rand(L, K, D, 64), True, {"0.1": 0.98}),
        HashWeights("hata", rand(L, K, D, 32), False),
        Choice("sign", 64, "sign 0.98, hata 0.97"),
        similarity,
        trace,
        Costs(((1, 4096, 1e-3), (8, 4096, 2e-3)), {"host": 1e10}, "a machine"),
    )


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


def same_part(a, b):
    fields = [field.name for field in dataclasses.fields(a)]
    return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in fields)


def test_everything_comes_back(tmp_path):
    parts = every_part()
    cal.update(tmp_path / "calibration", *parts, provenance=FROM, model=LLAMA)
    found = cal.read(tmp_path / "calibration").require_fit(LLAMA)
    assert set(found.parts()) == {part.part_name for part in parts}
    for part in parts:
        assert same_part(part, found.parts()[part.part_name])
        assert found.provenance[part.part_name] == FROM
    assert found.checkpoint_digests() == {"ab"}
    assert same_part(found.hash_of("sign", 64), parts[1]) and same_part(found.hash_of("hata", 32), parts[2])
    assert found.hash_of("sign", 128) is None


def test_an_update_keeps_other_parts_and_replaces_its_own(tmp_path):
    first, second = HashWeights("sign", rand(L, K, D, 64), True), HashWeights("sign", rand(L, K, D, 64, seed=1), True)
    cal.update(tmp_path, Importance(rand(L, K), "gates"), first, provenance={"seed": 1})
    returned = cal.update(tmp_path, second, provenance={"seed": 2})
    found = cal.read(tmp_path)
    for one in (found, returned):
        assert same_part(one.hash_of("sign", 64), second) and len(one.hash_weights) == 1
        assert one.importance.source == "gates"
        assert one.provenance == {"importance": {"seed": 1}, "hash-sign-64": {"seed": 2}}
    assert len(list(tmp_path.iterdir())) == 2, "the replaced tensors are gone"


def test_an_interrupted_update_leaves_what_was_there(tmp_path, monkeypatch):
    cal.update(tmp_path, Importance(rand(L, K), "gates"), provenance=FROM)
    replace = cal._replace

    def stop_before_the_head(path, data):
        if path.name == cal.FILE:
            raise KeyboardInterrupt
        replace(path, data)

    monkeypatch.setattr(cal, "_replace", stop_before_the_head)
    with pytest.raises(KeyboardInterrupt):
        cal.update(tmp_path, Importance(rand(L, K, seed=1), "quick estimate"), provenance=FROM)
    monkeypatch.undo()
    assert cal.read(tmp_path).importance.source == "gates"
    cal.update(tmp_path, Choice("sign", 64, "why"), provenance=FROM)
    assert len(list(tmp_path.iterdir())) == 2, "nothing of the interrupted update is left"


def test_absent():
    assert cal.read_if_there("/nowhere/calibration") is None
    with pytest.raises(CheckpointError, match=r"/nowhere/calibration/calibration\.json: cannot be read: No such file"):
        cal.read("/nowhere/calibration")


@pytest.mark.parametrize("which", ["calibration.json", "tensors"])
@pytest.mark.parametrize("how", ["cut", "changed", "missing"])
def test_damage_is_refused_by_file(tmp_path, which, how):
    cal.update(tmp_path, *every_part(), provenance=FROM)
    path = tmp_path / cal.FILE if which == cal.FILE else next(tmp_path.glob("*.safetensors"))
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if how == "cut" else data.replace(b"\x00\x00", b"\x00\x01", 1))
    if which == cal.FILE and how == "changed":
        path.write_bytes(data.replace(b'"gates"', b'"guess"'))
    with pytest.raises(CheckpointError, match=f"{path.name}: (cannot be read|cut|changed)"):
        cal.read(tmp_path)


def test_another_format_is_refused(tmp_path):
    cal.update(tmp_path, Choice("sign", 64, "why"), provenance=FROM)
    path = tmp_path / cal.FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    with pytest.raises(CheckpointError, match="format_version: got 2, this release reads 1"):
        cal.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_layers": L + 1}, "importance"),
        ({"num_heads": 2 * H}, "importance"),
        ({"num_kv_heads": 3}, "similarity"),
        ({"head_dim": 2 * D}, "hash-hata-32"),
    ],
)
def test_a_part_of_another_model_is_refused_by_file_and_name(tmp_path, change, part):
    found = cal.update(tmp_path, *every_part(), provenance=FROM)
    with pytest.raises(CheckpointError, match=rf"calibration\.json: {part}: .*: got shape .* wanted .*calibrate again"):
        found.require_fit(dataclasses.replace(LLAMA, **change))
    with pytest.raises(CheckpointError):
        cal.update(tmp_path, provenance=FROM, model=dataclasses.replace(LLAMA, **change))


@pytest.mark.parametrize("index", [4, 5])
def test_statistics_of_another_model_are_refused(tmp_path, index):
    part = every_part()[index]
    found = cal.Calibration().with_parts(part, provenance=FROM).require_fit(LLAMA)
    with pytest.raises(CheckpointError, match=f"^{part.part_name}: "):
        found.require_fit(dataclasses.replace(LLAMA, num_layers=L + 1))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Importance(np.full((2, 2), np.nan, np.float32), "gates"), "scores"),
        (lambda: Importance(np.full((2, 2), 1.5, np.float32), "gates"), "scores"),
        (lambda: HashWeights("sign", rand(L, K, D, 48), True), "weights"),
        (lambda: HashWeights("exact", rand(L, K, D, 32), True), "retriever"),
        (lambda: HashWeights("sign", rand(L, K, D, 32).astype(np.float16), True), "weights"),
        (lambda: HashWeights("sign", rand(L, K, D, 32) / np.float32(0), True), "weights"),
        (lambda: Costs(((1, 1, 0.0),), {}, "here"), "costs"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_values_that_make_no_sense(make, name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        make()


def test_digest_does_not_depend_on_the_order_of_keys():
    assert cal.digest({"a": 1, "b": [2]}) == cal.digest({"b": [2], "a": 1}) != cal.digest({"a": 1, "b": [3]})
