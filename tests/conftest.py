"""What every test runs under; set before jax is imported, and inherited by the processes that tests start.

Eight fake CPU devices. Most of the time is compiling tiny programs, so LLVM does not optimise them (products go to
libraries either way), and what one process has compiled the others find in a cache. `XLA_FLAGS` that are set already
stay: `XLA_FLAGS=--xla_backend_optimization_level=3 make test` tests programs as users run them.
"""

import os
import pathlib

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for _flag, _value in (("--xla_force_host_platform_device_count", 8), ("--xla_backend_optimization_level", 0)):
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()
_CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "xla"
for _name, _value in (
    ("JAX_COMPILATION_CACHE_DIR", _CACHE),
    ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 0),
    ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", -1),
):
    os.environ.setdefault(_name, str(_value))


@pytest.fixture
def job(monkeypatch):
    """Jobs of several processes that are threads here; their watches look fifty times a second."""
    from tests import fake_job  # imports jax
    from tlt_jax import processes

    monkeypatch.setattr(processes, "_BEAT_S", 0.02)
    jobs = fake_job.FakeJob()
    yield jobs
    jobs.close()
