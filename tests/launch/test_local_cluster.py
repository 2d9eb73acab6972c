"""Jobs of several processes, with processes that do next to nothing."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from launch import local_cluster

ROOT = pathlib.Path(__file__).parents[2]
REPORT = """
import json, os
names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "NPROC", "OMP_NUM_THREADS")
print(json.dumps({n: os.environ.get(n) for n in names} | {"cores": sorted(os.sched_getaffinity(0))}))
"""
# Process 1 says its phase and fails as told; process 0 would go on for ever.
FAIL = """
import os, signal, sys, time
if os.environ["JAX_PROCESS_ID"] == "1":
    open(os.environ["TLT_PHASE_FILE"], "w").write("step 2, rollout")
    print("bad news", file=sys.stderr, flush=True)
    {failure}
{survivor}
while True:
    time.sleep(0.05)
"""


def start(script, *flags):
    command = [sys.executable, "-m", "launch.local_cluster", *flags, "--", sys.executable, "-c", script]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for_line(process, text):
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"no line with {text!r}")


def test_each_process_knows_its_place_and_has_its_core():
    """Prefixed output; process 0's result is the last line."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    code, out, _ = finish(start(REPORT, f"--processes={len(cores)}", "--pin"))
    lines = out.splitlines()
    reports = [json.loads(line.split("] ", 1)[1]) for line in sorted(lines[: len(cores)])]
    assert code == 0 and sorted(line[:4] for line in lines[:-1]) == [f"[{i}] " for i in range(len(cores))]
    assert json.loads(lines[-1]) == reports[0]
    share = len(os.sched_getaffinity(0)) // len(cores)
    for i, report in enumerate(reports):
        assert report["JAX_PROCESS_ID"] == str(i) and report["JAX_NUM_PROCESSES"] == str(len(cores))
        assert report["NPROC"] == report["OMP_NUM_THREADS"] == str(share) and len(report["cores"]) == share
    assert len({report["JAX_COORDINATOR_ADDRESS"] for report in reports}) == 1
    assert len({core for report in reports for core in report["cores"]}) == share * len(cores)


def test_without_pin_cores_and_threads_stay_as_they_are(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    code, out, _ = finish(start(REPORT, "--processes=1"))
    report = json.loads(out.splitlines()[-1])
    assert (code, report["NPROC"], report["cores"]) == (0, None, sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("failure", "code", "how"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    ],
)
def test_the_first_failure_ends_the_others(failure, code, how):
    """E6: exit code and last words are the failing process's."""
    got, _, err = finish(start(FAIL.format(failure=failure, survivor=""), "--processes=3"))
    assert got == code and "[1] bad news" in err
    assert f"local_cluster: process 1 {how} in step 2, rollout; ending the other 2" in err


def test_a_process_that_does_not_end_is_killed_after_the_grace():
    """E3: SIGTERM ignored, as by a process that hangs in a collective."""
    survivor = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    start_s = time.monotonic()
    code, _, _ = finish(
        start(FAIL.format(failure="time.sleep(0.3); sys.exit(1)", survivor=survivor), "--processes=2", "--grace_s=0.5")
    )
    assert code == 1 and time.monotonic() - start_s < 20.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_on_to_every_process(number):
    script = """
import signal, sys, time
def end(number, frame):
    print("ends with", number, flush=True)
    sys.exit(1)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
    process = start(script, "--processes=2")
    for _ in range(2):
        wait_for_line(process, "ready")
    process.send_signal(number)
    code, out, _ = finish(process)
    assert code == 1 and sorted(out.splitlines()) == [f"[{i}] ends with {int(number)}" for i in range(2)]


def test_what_a_process_leaves_behind_is_ended():
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"
    code, out, _ = finish(start(script, "--processes=1"))
    pid = int(out.split("] ")[1])
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}") or pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the grandchild lives on")
    assert code == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--processes=0", "--", "true"], "--processes: got 0, expected at least 1"),
        (["--processes=2"], "command: got none, expected one after --"),
        (["--processes=2", "--", "/nonexistent/command"], "No such file or directory"),
    ],
)
def test_bad_arguments_are_refused(argv, message, capsys):
    assert local_cluster.main(argv) == 2
    assert message in capsys.readouterr().err


def test_cores_are_shared_out_evenly():
    assert local_cluster.plan_cores(2, [0, 1, 2, 3, 4]) == [[0, 1], [2, 3]]
    assert local_cluster.plan_cores(2, [4, 7]) == [[4], [7]]
    with pytest.raises(ValueError, match="got 1 cores for 2 processes, expected at least one each; start fewer"):
        local_cluster.plan_cores(2, [0])
