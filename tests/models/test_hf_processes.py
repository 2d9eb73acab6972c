"""Loading and exporting in a job of two processes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import parity_models as tiny
from tests.tiny_model import ONE_DEVICE
from tlt_jax.models import hf

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import json, os, sys
process, port, source, out = int(sys.argv[1]), *sys.argv[2:5]
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from tlt_jax.models import hf, hf_export, transformer
from tlt_jax.sharding import MeshConfig, make_mesh, param_shardings
shapes = transformer.param_shapes(hf.load_config(source))
config, params = hf.load_hf(source, shardings=param_shardings(shapes, make_mesh(MeshConfig())))
whole = [path for path, x in hf.flatten(params).items() if x.is_fully_addressable]
hf_export.save_hf(out, config, params)
written = os.path.exists(os.path.join(out, "config.json"))
try:
    hf_export.save_hf(out, config, params)
    error = None
except (OSError, ValueError) as caught:
    error = f"{type(caught).__name__}: {caught}"
print(json.dumps({"fully_addressable": whole, "written": written, "error": error}), flush=True)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_two_processes_export_one_directory(tmp_path):
    """E4: both take part, process 0 writes, both return when it is there; a refusal reaches both and hangs none."""
    config = tiny.FAMILIES["qwen2_untied"]
    params = tiny.write_model(tmp_path / "source", config)
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": f"{ONE_DEVICE} --xla_force_host_platform_device_count=2"}
    arguments = [str(free_port()), str(tmp_path / "source"), str(tmp_path / "out")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), *arguments], env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for i in range(2)
    ]
    try:
        reports = [json.loads(p.communicate(timeout=240)[0].splitlines()[-1]) for p in processes]
    finally:
        for process in processes:
            process.kill()
    assert [r["written"] for r in reports] == [True, True]
    assert all(r["fully_addressable"] == [] for r in reports)  # every parameter spans both processes
    assert reports[0]["error"].startswith("ValueError") and "got an existing path" in reports[0]["error"]
    assert reports[1]["error"].startswith("OSError") and "process 0 could not write" in reports[1]["error"]
    _, loaded = hf.load_hf(tmp_path / "out")
    for path, array in hf.flatten(params).items():
        np.testing.assert_array_equal(hf.flatten(loaded)[path], array)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
