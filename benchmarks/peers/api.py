"""Runs a peer from our own code: is it installed, and what does it measure on a job.

    if api.available("tunix"):
        result = api.run_peer("tunix", job, timeout_s=600)   # result["tok_s"], ...

Life of a call: the job is checked here, written to a temporary file, and the peer's runner is started with the Python
of the peer's own environment (`setup.sh` makes it); the last JSON line of its output is checked and returned.

Invariants: standard library only, nothing of a peer is ever imported into our process; the child inherits no XLA or JAX
setting of ours; a child that outlives its limit is ended with everything it started.
"""

import dataclasses
import difflib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
from typing import Any

from benchmarks.peers.job import Job, job_from_dict

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVS_VARIABLE = "TLT_PEER_ENVS"  # where the environments are, if not in .venv-peers
READY_FILE = ".peer-ready"  # setup.sh writes it last
_DROPPED_PREFIXES = ("XLA_", "JAX_", "PYTHON", "VIRTUAL_ENV", "LD_PRELOAD")


@dataclasses.dataclass(frozen=True)
class Peer:
    """One peer: its environment, its runner module and the kinds of job it takes."""

    env: str
    module: str
    kinds: tuple[str, ...]


PEERS = {
    "tunix": Peer("tunix", "benchmarks.peers.run_tunix", ("rollout", "train")),
    "transformers": Peer("transformers", "benchmarks.peers.run_transformers", ("rollout", "train")),
    "llama_cpp": Peer("llama_cpp", "benchmarks.peers.run_llama_cpp", ("rollout",)),
    "vllm": Peer("vllm", "benchmarks.peers.run_vllm", ("rollout",)),
    "trl": Peer("trl", "benchmarks.peers.run_trl", ("train",)),
}


class PeerError(RuntimeError):
    """A peer that is not installed, failed, ran past its limit, or printed no result."""


def get_peer(name: str) -> Peer:
    """The peer of that name.

    Raises:
      ValueError: no such peer; the nearest name is given.
    """
    if name not in PEERS:
        near = difflib.get_close_matches(name, PEERS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "name one of them"
        raise ValueError(f"peer: got '{name}', expected one of {sorted(PEERS)}; {hint}")
    return PEERS[name]


def env_dir(name: str) -> pathlib.Path:
    """Where the peer's environment is, or would be."""
    envs = os.environ.get(ENVS_VARIABLE)
    return (pathlib.Path(envs) if envs else ROOT / ".venv-peers") / get_peer(name).env


def available(name: str) -> bool:
    """Whether `setup.sh` has finished the peer's environment.

    Raises:
      ValueError: no such peer.
    """
    return (env_dir(name) / READY_FILE).is_file()


def run_peer(name: str, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Measures a peer on a job; blocks until it is done.

    Args:
      name: a key of `PEERS`.
      job: the fields of a `RolloutJob` or `TrainJob` (`job.py`).
      timeout_s: wall-clock limit of the whole child, installing excluded, compilation included.

    Returns:
      The runner's result: tok_s, tok_per_cpu_s, wall_s, walls_s, cpu_s, compile_s, useful_tokens, utilisation
      (rollout), logprob_tok_s, update_s, first_step (train), versions, settings, threads, and token_ids where the job
      asks for them.

    Raises:
      ValueError: unknown peer, bad job, or a kind of job that the peer does not take.
      PeerError: not installed, failed (the end of its error output is given), out of time, or no result.
    """
    peer, checked = get_peer(name), job_from_dict(job)
    if checked.kind not in peer.kinds:
        raise ValueError(f"peer '{name}': got a job of kind '{checked.kind}', expected one of {list(peer.kinds)}")
    if not available(name):
        raise PeerError(f"peer '{name}' is not installed; run: benchmarks/peers/setup.sh {peer.env}")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "job.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(checked), file)
        command = [str(env_dir(name) / "bin" / "python"), "-m", peer.module, path]
        return parse_result(name, checked, _run(name, command, timeout_s))


def parse_result(name: str, job: Job, stdout: str) -> dict[str, Any]:
    """The result in a runner's output: its last line that is a JSON object naming the peer.

    Raises:
      PeerError: there is none, or it is not about this job.
    """
    for line in reversed(stdout.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if result.get("peer") == name and result.get("kind") == job.kind:
            lacking = [field for field in ("tok_s", "cpu_s", "compile_s", "versions") if field not in result]
            if lacking:
                raise PeerError(f"peer '{name}': its result lacks {lacking}")
            return result
    raise PeerError(f"peer '{name}' printed no result; its output ends: {stdout[-500:]!r}")


def _run(name: str, command: list[str], timeout_s: float) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED_PREFIXES)}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        ) as child,
    ):
        try:
            stdout, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"peer '{name}' ran past its limit of {timeout_s} s") from error
        finally:
            _end_group(child)
        log.seek(0)
        if child.returncode != 0:
            raise PeerError(f"peer '{name}' failed with exit code {child.returncode}:\n{log.read()[-2000:].strip()}")
    return stdout


def _end_group(child: subprocess.Popen) -> None:
    """Ends what the child left behind: it leads a process group of its own."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
