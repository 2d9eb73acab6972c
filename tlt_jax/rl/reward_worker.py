"""A process that scores rows: `python -m tlt_jax.rl.reward_worker`, started by `rewards`, never by hand.

JSON lines over stdin and stdout:
  1. in  {"weights", "sandbox", "timeout_s", "memory_bytes"}  ->  out {"ready": true}
  2. in  a nonce, then {"text", "reference"}  ->  out {"nonce", "last"} and one of {"score": x}, {"error": text},
     {"timeout": true}; one line per row. `last` says that this worker takes no more rows.
  3. end of input ends the process.

Each row runs in a forked child of its own, which has the limits and the sandbox: what a row breaks, keeps or
changes ends with it, and a hung one is killed without losing the imports. This process runs no response
itself, so it always notices the end of its input, even if its parent was killed. A child never sees the wires
nor a nonce, so the worst it can do is to forge its own row's score.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tlt_jax.rl import gym, sandbox, verifiers

_MAX_ERROR_LEN = 300
_MAX_REPLY_BYTES = 65536


def run_row(row: Mapping[str, Any], score: Callable, settings: Mapping[str, Any], wires: tuple[int, int]) -> dict:
    """Scores one row in a child process; kills the child at the limit, or when the input hangs up."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        for descriptor in (*wires, read_fd):
            os.close(descriptor)
        _score_and_exit(row, score, settings, write_fd)
    os.close(write_fd)
    reply = _await_reply(read_fd, wires[0], settings["timeout_s"])
    os.close(read_fd)
    os.kill(child, signal.SIGKILL)  # a child that has answered has nothing left to do
    os.waitpid(child, 0)
    return reply


def _score_and_exit(row, score, settings, write_fd) -> None:
    """Body of the child; never returns, whatever `score` does."""
    reply: dict[str, Any] = {}
    try:
        quiet = os.open(os.devnull, os.O_RDWR)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sandbox.limit_resources(settings["timeout_s"], settings["memory_bytes"])
        sandbox.lock_down(settings["sandbox"])
        reply = {"score": score(row["text"], row["reference"])}
    finally:
        kind, error, _ = sys.exc_info()
        if kind is not None:
            reply = {"error": traceback.format_exception_only(kind, error)[-1].strip()[:_MAX_ERROR_LEN]}
        os.write(write_fd, json.dumps(reply).encode())
        os._exit(0)


def _await_reply(read_fd: int, input_fd: int, timeout_s: float) -> dict[str, Any]:
    poller = select.poll()
    poller.register(read_fd, select.POLLIN)
    poller.register(input_fd, 0)  # reports a hang-up only
    ready = dict(poller.poll(timeout_s * 1e3))
    if not ready:
        return {"timeout": True}
    if read_fd not in ready:
        return {"error": "the run that asked for this score is gone"}
    return _checked_reply(os.read(read_fd, _MAX_REPLY_BYTES))


def _checked_reply(raw: bytes) -> dict[str, Any]:
    """A reply is not trusted: executed text may have written it."""
    if not raw:
        return {"error": "the scorer's process died (out of memory or CPU time, or ended itself)"}
    try:
        reply = json.loads(raw)
        if "error" in reply:
            return {"error": str(reply["error"])[:_MAX_ERROR_LEN]}
        return {"score": float(reply["score"])}
    except (ValueError, TypeError, KeyError):
        return {"error": "the scorer's process answered with something else than a score"}


def _has_leftover_processes() -> bool:
    """True where a row started processes that outlive it; they are this process's children by now."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _warm_up(weights: Mapping[str, float]) -> None:
    """Imports before the first row, so that no row's limit pays for it."""
    if "math" in weights:
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        verifiers.score_math(r"\boxed{1}", {"answer": "1"})
    if "arithmetic" in weights:
        verifiers.score_arithmetic(r"\boxed{1}", {"answer": "1"})
    if "reasoning_gym" in weights:
        gym.import_reasoning_gym()


def main() -> None:
    """Reads settings and rows until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when to stop
    lines, output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    wires = lines.fileno(), output.fileno()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what imports print goes with the errors
    sandbox.guard_worker()

    def write(message: Mapping[str, Any]) -> None:
        output.write(json.dumps(message).encode() + b"\n")
        output.flush()

    settings = json.loads(lines.readline())
    score = verifiers.make_scorer(settings["weights"])
    _warm_up(settings["weights"])
    write({"ready": True})
    while nonce := lines.readline().decode().strip():
        row = json.loads(lines.readline())
        if "reasoning_gym" in row["reference"] and "reasoning_gym" in settings["weights"]:
            gym.find_entry(row["reference"]["reasoning_gym"])  # made here, shared by all children
        reply = run_row(row, score, settings, wires)
        is_last = _has_leftover_processes()
        write({**reply, "nonce": nonce, "last": is_last})
        if is_last:
            return  # a process namespace ends with this process, and the leftovers with it


if __name__ == "__main__":
    main()
