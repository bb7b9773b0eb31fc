"""One tiny checkpoint for all suites of evaluation, which only read it."""

import pytest

from tests import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"))
