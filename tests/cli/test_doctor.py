"""clo-jax doctor: what AUTO takes and why, on this machine and on described ones."""

import dataclasses
import json

from clo_jax.cli import doctor
from clo_jax.versions import versions


@dataclasses.dataclass(frozen=True)
class Backend:
    name: str
    available: bool
    reason: str
    gb_per_s: float | None


PULL = Backend("pull", False, "no CUDA in this build", None)
HOST = Backend("host", True, "copies inside host memory", 8.25)


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
    for text in ("avx2", "cpu:0 cpu", "3.00 GiB", "CLO_JAX_ISA=avx2", "8.2 GB/s", "no CUDA in this build", "GNU 12"):
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
