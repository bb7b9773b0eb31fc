"""clo-jax doctor: what AUTO takes and why, on this machine and on described ones."""

import json

import pytest

from clo_jax.cli import doctor
from clo_jax.errors import TransferError
from clo_jax.transfer import backends as module
from clo_jax.versions import versions

PULL = doctor.Checked("pull", False, "no CUDA in this build")
HOST = doctor.Checked("host", True, "copies inside host memory", 8.25, 12.3, 2)


def test_auto_takes_the_first_that_works_and_says_what_was_skipped():
    assert doctor.auto_choice([HOST, PULL]) == (
        "host",
        "first in the order of preference whose probe copy succeeded",
    )
    assert doctor.auto_choice([PULL, HOST]) == (
        "host",
        "first in the order of preference whose probe copy succeeded; before it pull (no CUDA in this build)",
    )
    assert doctor.auto_choice([PULL]) == (None, "none is available: pull (no CUDA in this build)")


@pytest.mark.parametrize("works", [True, False])
def test_a_backend_counts_as_available_when_its_probe_copy_succeeds(monkeypatch, works):
    def probe(name):
        if not works:
            raise TransferError("3 of 10 rows arrived wrong")
        return module.Probe(gb_per_s=8.25, latency_us=12.3, threads=2, row_bytes=512)

    described = (module.Backend("pull", False, PULL.reason), module.Backend("host", True, HOST.reason))
    monkeypatch.setattr(module, "backends", lambda: described)
    monkeypatch.setattr(module, "probe", probe)
    failed = doctor.Checked("host", False, "3 of 10 rows arrived wrong")
    assert doctor.check_backends() == [PULL, HOST if works else failed]


def facts(backends):
    name, why = doctor.auto_choice(backends)
    return {
        "versions": versions(),
        "native": {"build_type": "Release", "compiler": "GNU 12", "jaxlib": "0.10.2", "cuda": False},
        "devices": ["cpu:0 cpu"],
        "instruction_set": "avx2",
        "cpus": 2,
        "memory_available_bytes": 3 << 30,
        "backends": backends,
        "auto": {"backend": name, "why": why},
        "environment": {"CLO_JAX_ISA": "avx2"},
    }


def test_report(run, monkeypatch):
    monkeypatch.setattr(doctor, "collect", lambda: facts([PULL, HOST]))
    result = run("doctor")
    assert result.code == 0
    for text in (
        "avx2",
        "cpu:0 cpu",
        "3.00 GiB",
        "CLO_JAX_ISA=avx2",
        "8.2 GB/s",
        "12 us",
        "no CUDA in this build",
        "GNU 12",
    ):
        assert text in result.out
    assert "AUTO takes host: first in the order of preference" in result.out


def test_no_backend_at_all_is_a_failed_run(run, monkeypatch):
    monkeypatch.setattr(doctor, "collect", lambda: facts([PULL]))
    result = run("doctor")
    assert result.code == 1
    assert "error: no transfer backend: none is available: pull" in result.err


def test_this_machine(run):
    result = run("doctor", "--json")
    assert result.code == 0
    found = json.loads(result.out)
    host = {backend["name"]: backend for backend in found["backends"]}["host"]
    assert host["available"] and host["gb_per_s"] > 0
    assert found["auto"]["backend"] is not None
    assert found["memory_available_bytes"] > 0 and found["cpus"] > 0
    assert found["instruction_set"] in ("generic", "avx2", "avx512")
    assert found["versions"] == versions()
