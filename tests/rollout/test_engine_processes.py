"""Engines of two real processes, each over two devices of its own, agree on every token."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.models.test_hf_processes import free_port
from tests.rollout import tiny
from tests.tiny_model import ONE_DEVICE

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import json, sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
from tests.rollout import drafters, test_engine_processes, tiny
from tests.rollout.test_engine_speculation import make
from tlt_jax.sharding import Versioned, replicated, worker_meshes
(mesh,) = worker_meshes(jax.local_devices(), 1)
weights = Versioned(jax.device_put(drafters.eagle_weights().params, replicated(mesh)), 1)
engine = make("chain_1", "ngram_1", max_rounds=2, mesh=mesh, weights=weights)
done = engine.generate(test_engine_processes.requests())
report = {"devices": mesh.size, "arms": sorted(engine.stats.arm_rounds)}
report |= {"tokens": tiny.tokens_of(done), "logprobs": [c.logprobs.tobytes().hex() for c in done]}
print(json.dumps(report), flush=True)
"""


def requests():
    """One prompt four times, then another: only the request tells the rows apart."""
    return [tiny.request(i, tiny.prompt(i // 4, 9), prompt_id=i // 4, max_tokens=20, ignore_eos=True) for i in range(5)]


@pytest.mark.slow
def test_two_processes_keep_the_same_runs():
    """A36: tensor-parallel on two devices each, speculating, the same batch: bit-equal tokens and log-probs, and those
    of plain decoding on one device; rows of one prompt have noise of their own."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"{ONE_DEVICE} --xla_force_host_platform_device_count=2",
    }
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), port], env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for i in range(2)
    ]
    try:
        reports = [json.loads(p.communicate(timeout=240)[0].splitlines()[-1]) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert reports[0] == reports[1]
    assert reports[0]["devices"] == 2 and reports[0]["arms"] == ["chain_1", "ngram_1"]
    tokens = {int(i): ids for i, ids in reports[0]["tokens"].items()}
    assert tokens == tiny.tokens_of(tiny.make_engine().generate(requests()))
    assert len({tuple(tokens[i]) for i in range(4)}) == 4
