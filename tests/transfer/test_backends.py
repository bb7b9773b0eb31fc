"""Backends as `doctor` shows them, and the probe copy."""

import re

import numpy as np
import pytest

from clo_jax.errors import TransferError
from clo_jax.transfer import backends
from clo_jax.transfer.engine import Engine


def test_every_backend_is_listed_with_a_reason():
    listed = {b.name: b for b in backends.backends()}
    assert list(listed) == ["pull", "bar", "staged", "host"]
    assert listed["host"].available and all(b.reason for b in listed.values())
    for name, b in listed.items():
        if not b.available:
            with pytest.raises(ValueError, match=re.escape(f'backend: got "{name}", {b.reason}')):
                Engine([1], 1, 8, 8, 16, np.float32, name)


def test_the_probe_copies_and_measures():
    measured = backends.probe("host", threads=2)
    assert measured.threads == 2 and measured.row_bytes == 512
    assert 0.01 < measured.gb_per_s < 1000
    assert 0 < measured.latency_us < 1e6


def test_the_probe_notices_wrong_rows(monkeypatch):
    class Forgetful(Engine):
        def wait(self, layer):
            super().wait(layer)
            self.selected_rows(layer)[0, 3, 5] = 0

    monkeypatch.setattr(backends, "Engine", Forgetful)
    with pytest.raises(TransferError, match="backend host: 1 of 13104 rows arrived wrong"):
        backends.probe("host")
    host = backends.report()[-1]
    assert not host.available and host.gb_per_s is None
    assert host.reason == "its probe copy failed: backend host: 1 of 13104 rows arrived wrong"


def test_the_report_measures_what_is_available():
    for b in backends.report():
        assert (b.gb_per_s is not None) == b.available and (b.gb_per_s is None or b.gb_per_s > 0.01)
