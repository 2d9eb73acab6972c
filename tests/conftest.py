"""Eight fake CPU devices for every test; set before jax is imported."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()


@pytest.fixture
def job(monkeypatch):
    """Jobs of several processes that are threads here; their watches look fifty times a second."""
    from tests import fake_job  # imports jax
    from tlt_jax import processes

    monkeypatch.setattr(processes, "_BEAT_S", 0.02)
    jobs = fake_job.FakeJob()
    yield jobs
    jobs.close()
