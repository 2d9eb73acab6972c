"""The stores by value: one process, and two real ones."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from tlt_jax.coordinator.store import LocalStore, ServiceStore, TimedStore

# Each process runs the same checks on keys of its own, then they meet on shared ones.
PROCESS = """
import os, sys
import jax
index = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, index)
from tests.coordinator.test_store import check_one, check_shared
from tlt_jax.coordinator.store import ServiceStore
store = ServiceStore("test")
check_one(store, f"own/{index}")
check_shared(store, index)
print("fine", index)
"""


def check_one(store, root):
    assert store.get(f"{root}/a") is None and store.list(root) == {}
    store.set(f"{root}/a", "1")
    store.set(f"{root}/b/c", "2")
    store.set(f"{root}x", "not below")
    assert store.get(f"{root}/a") == "1" and store.get(f"{root}/b/c", 5.0) == "2"
    assert store.list(root) == {f"{root}/a": "1", f"{root}/b/c": "2"} and store.list(f"{root}/b") == {
        f"{root}/b/c": "2"
    }
    assert store.get(f"{root}/never", timeout_s=0.01) is None
    assert [store.add(f"{root}/n", k) for k in (1, 0, 3)] == [1, 1, 4]
    with pytest.raises((ValueError, RuntimeError)):
        store.set(f"{root}/a", "again")
    store.delete(f"{root}/b")
    store.delete(f"{root}/nothing")
    assert store.list(root) == {f"{root}/a": "1"} | ({f"{root}/n": "4"} if isinstance(store, ServiceStore) else {})
    store.delete(root)
    assert store.get(f"{root}/a") is None and store.add(f"{root}/n", 1) == 1


def check_shared(store, index):
    """Each claims ten times; no claim is given twice; each is woken by a key that the other sets."""
    claims = [store.add("claims", 1) for _ in range(10)]
    store.set(f"claims-of/{index}", ",".join(map(str, claims)))
    theirs = store.get(f"claims-of/{1 - index}", timeout_s=60.0)
    assert sorted(claims + [int(c) for c in theirs.split(",")]) == list(range(1, 21))


def test_a_store_in_one_process():
    store = LocalStore()
    check_one(store, "a")
    assert store.list("a") == {} and store.add("a/n", 0) == 1


def test_a_local_store_serves_threads_and_wakes_them():
    store = LocalStore()
    threads = [threading.Thread(target=check_shared, args=(store, i)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert set(store.list("claims-of")) == {"claims-of/0", "claims-of/1"} and store.add("claims", 0) == 20


def test_two_processes_share_the_coordination_services_store():
    """E5: a wait has an end; E9: a counter gives each number to one process."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    env = os.environ | {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen(
            [*command, str(i), address], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    for i, process in enumerate(processes):
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out.strip()) == (0, f"fine {i}"), err[-2000:]


def test_calls_are_counted_by_thread_and_waits_are_not():
    store = TimedStore(LocalStore())
    store.set("a", "1")
    store.get("a")
    store.get("b", timeout_s=0.01)
    store.add("n", 2)
    assert (store.list(""), store.spent()[0]) == ({}, 4)
    store.delete("a")
    calls, seconds = store.spent()
    assert calls == 5 and 0.0 < seconds < 1.0
    counts = []
    thread = threading.Thread(target=lambda: counts.append(store.spent()))
    thread.start()
    thread.join()
    assert counts == [(0, 0.0)]


def test_a_process_alone_has_no_coordination_service():
    with pytest.raises(ValueError, match=r"got no coordination service, expected jax.distributed.initialize"):
        ServiceStore()
