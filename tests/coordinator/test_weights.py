"""The merge of independently trained drafters, by value: in one process, and over two real ones."""

import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.coordinator.weights import merge

# Process 0 has two workers of weights 3 and 1, process 1 one of weight 0 and then one of weight 4.
PROCESS = """
import json, sys
import jax
index = int(sys.argv[1])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, index)
import numpy as np
from tests.coordinator.test_weights import tree
from tlt_jax.coordinator.weights import merge
said = []
for late in (0.0, 4.0):
    trees, weights = ([tree(1.0, 5), tree(9.0, 7)], [3.0, 1.0]) if index == 0 else ([tree(11.0, 6)], [late])
    merged, total, stats = merge(trees, weights, np.array([1.0 + index, 10.0]))
    said.append([np.asarray(merged["w"]).tolist(), int(merged["n"]), total, stats.tolist()])
base = tree(2.0, 1)
merged, total, stats = merge([base], [0.0], np.zeros(1))
said.append([np.asarray(merged["w"]).tolist(), int(merged["n"]), total, stats.tolist()])
print(json.dumps(said))
"""


def tree(value, count):
    return {"w": jnp.full((2, 2), value), "n": jnp.int32(count)}


def test_the_mean_is_weighted_by_tokens():
    """E1, E2: a worker with nothing to give changes nothing, whatever it holds."""
    stats = np.array([4.0, 0.5])
    merged, total, summed = merge([tree(1.0, 5), tree(9.0, 7), tree(float("nan"), 99)], [3.0, 1.0, 0.0], stats)
    np.testing.assert_allclose(merged["w"], 3.0)
    assert (int(merged["n"]), total, merged["w"].dtype) == (7, 4.0, jnp.float32)
    np.testing.assert_array_equal(summed, stats)


def test_without_any_tokens_nothing_changes():
    base = tree(2.0, 3)
    merged, total, _ = merge([base, tree(5.0, 9)], [0.0, 0.0], np.zeros(1))
    assert merged is base and total == 0.0


def test_workers_on_other_devices_are_merged_where_the_first_one_is():
    a, b = (jax.device_put(tree(v, 1), d) for v, d in zip((2.0, 6.0), jax.devices()[2:4], strict=True))
    merged, _, _ = merge([a, b], [1.0, 1.0], np.zeros(1))
    np.testing.assert_allclose(merged["w"], 4.0)
    assert merged["w"].devices() == {jax.devices()[2]}
    np.testing.assert_allclose(a["w"], 2.0)  # neither is donated
    np.testing.assert_allclose(b["w"], 6.0)


def test_two_processes_enter_one_collective():
    """E1, E2: different numbers of workers and tokens, one with none at all: both get the same mean."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    env = os.environ | {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(i), address],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-2000:]
        alone, both, none = json.loads(out.strip().splitlines()[-1])
        assert alone == [[[pytest.approx(3.0)] * 2] * 2, 7, 4.0, [3.0, 20.0]]
        assert both == [[[pytest.approx(7.0)] * 2] * 2, 7, 8.0, [3.0, 20.0]]
        assert none == [[[2.0] * 2] * 2, 1, 0.0, [0.0]]
