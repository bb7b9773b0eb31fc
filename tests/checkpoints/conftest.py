"""Converted tiny models, made once."""

import gc

import pytest

from clo_jax import checkpoints
from tests.checkpoints import builders


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A Hugging Face folder of an untied Llama in float32."""
    config = builders.config()
    return builders.write_folder(tmp_path_factory.mktemp("source") / "tiny", config, builders.tensors(config))


@pytest.fixture(scope="session")
def checkpoint(source, tmp_path_factory):
    """The same, converted. Not to be written to."""
    return checkpoints.convert(source, tmp_path_factory.mktemp("converted") / "tiny").path


@pytest.fixture(autouse=True)
def collected():
    """What a test leaves to the garbage collector warns in that test and in no later one."""
    yield
    gc.collect()
