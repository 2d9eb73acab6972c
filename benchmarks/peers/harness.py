"""What every peer's runner does around its own code: threads, clock, result.

Life of a runner (`python -m benchmarks.peers.run_PEER JOB.json`, in the peer's environment):
  1. read and check the job; pin the process to `threads` CPUs before any numeric library is imported;
  2. the peer loads the model and returns `run_once(seed)`;
  3. `warmup` calls, apart: they carry tracing and compilation; then `repeats` timed calls, each with its own seed;
  4. one JSON object as the last line of stdout.

Invariants: standard library only; model loading and warm-up are never inside a timed call; wall seconds and the
process's CPU seconds (all its threads) are both given, since on a machine with other load only the second can be
trusted.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers.job import Job, JobError, RolloutJob, TrainJob, load_job

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


@dataclasses.dataclass(frozen=True)
class Generated:
    """What one call of a rollout peer gave back."""

    lengths: list[int]  # useful tokens per request, the stop token included
    slot_tokens: int  # token positions computed while decoding, padding and finished rows included
    token_ids: list[list[int]]  # generated ids per request, cut to the useful ones


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one timed call."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def pin_threads(threads: int) -> list[int]:
    """Restricts this process to its first `threads` CPUs and sets the thread variables; call before numeric imports.

    Affinity is what binds the pools that read no variable (XLA's sizes itself by it).

    Raises:
      JobError: fewer CPUs are available.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < threads:
        raise JobError(f"threads: got {threads}, but this process may use {len(cpus)} CPUs; ask for at most that")
    os.sched_setaffinity(0, cpus[:threads])
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    return cpus[:threads]


def timed(call: Callable[[], Any]) -> tuple[Any, Timing]:
    """Runs `call` and gives its result and seconds."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = call()
    return result, Timing(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def versions(*packages: str) -> dict[str, str]:
    """Versions of the installed packages named, and of Python."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def static_batches(job: RolloutJob) -> list[list[int]]:
    """Request indices in order, `batch_size` at a time: what an engine without refill serves."""
    indices = list(range(len(job.prompts)))
    return [indices[i : i + job.batch_size] for i in range(0, len(indices), job.batch_size)]


def cut(row: list[int], job: RolloutJob, index: int) -> list[int]:
    """The useful tokens of a row that ran with its batch: up to its own length, or through its first stop id."""
    row = row[: job.max_new_tokens[index]]
    stops = [i for i, token in enumerate(row) if token in job.stop_token_ids]
    return row[: stops[0] + 1] if stops else row


def measure_rollout(job: RolloutJob, run_once: Callable[[int], Generated]) -> dict[str, Any]:
    """Warm-up, then repeats; medians over the repeats.

    Raises:
      RuntimeError: without stop ids, a response whose length is not the one asked for.
    """
    warm = [timed(lambda seed=job.seed + i: run_once(seed))[1] for i in range(job.warmup)]
    runs = [timed(lambda seed=job.seed + job.warmup + i: run_once(seed)) for i in range(job.repeats)]
    for out, _ in runs:
        if not job.stop_token_ids and out.lengths != job.max_new_tokens:
            raise RuntimeError(f"response lengths {out.lengths} are not the lengths asked for, {job.max_new_tokens}")
    useful = [sum(out.lengths) for out, _ in runs]
    rates = [n / t.wall_s for n, (_, t) in zip(useful, runs, strict=True)]
    cpu_rates = [n / t.cpu_s for n, (_, t) in zip(useful, runs, strict=True)]
    result = _timing_fields(warm, [t for _, t in runs]) | {
        "tok_s": round(statistics.median(rates), 2),
        "tok_per_cpu_s": round(statistics.median(cpu_rates), 2),
        "useful_tokens": round(statistics.median(useful)),
        "utilisation": round(sum(useful) / sum(out.slot_tokens for out, _ in runs), 4),
    }
    if job.return_tokens:
        result["token_ids"] = runs[-1][0].token_ids
    return result


def measure_train(
    job: TrainJob, logprob_pass: Callable[[], object], update: Callable[[], dict[str, float]]
) -> dict[str, Any]:
    """Times the log-prob forward and the update apart; `tok_s` is the update's, in prompt and response tokens.

    At least two warm-up steps: the second is where an optimizer state's changed layout or type compiles again.
    """

    def step() -> tuple[dict[str, float], Timing, Timing]:
        logprob = timed(logprob_pass)[1]
        metrics, update_timing = timed(update)
        return metrics, logprob, update_timing

    warm = [step() for _ in range(max(2, job.warmup))]
    pairs = [step()[1:] for _ in range(job.repeats)]
    update_s = statistics.median(b.wall_s for _, b in pairs)
    return _timing_fields([a + b for _, a, b in warm], [a + b for a, b in pairs]) | {
        "tok_s": round(job.num_tokens / update_s, 2),
        "tok_per_cpu_s": round(job.num_tokens / statistics.median(b.cpu_s for _, b in pairs), 2),
        "logprob_tok_s": round(job.num_tokens / statistics.median(a.wall_s for a, _ in pairs), 2),
        "update_s": round(update_s, 4),
        "useful_tokens": job.num_tokens,
        "first_step": warm[0][0],  # loss and gradient norm at the initial weights: equal across peers
    }


def _timing_fields(warm: list[Timing], runs: list[Timing]) -> dict[str, Any]:
    wall_s = statistics.median(run.wall_s for run in runs)
    return {
        "wall_s": round(wall_s, 4),
        "walls_s": [round(run.wall_s, 4) for run in runs],
        "cpu_s": round(statistics.median(run.cpu_s for run in runs), 4),
        "compile_s": round(max(0.0, sum(run.wall_s - wall_s for run in warm)), 3),  # warm-up beyond warm calls
    }


def run_peer_main(peer: str, handlers: dict[str, Callable[[Any], dict[str, Any]]]) -> None:
    """Entry point of a runner: job file in, one JSON line out. Exit code 2 for a job this peer cannot take."""
    parser = argparse.ArgumentParser(prog=f"run_{peer}")
    parser.add_argument("job", help="job file (JSON)")
    path = parser.parse_args().job
    try:
        job: Job = load_job(path)
        if job.kind not in handlers:
            raise JobError(f"peer '{peer}' takes jobs of kind {sorted(handlers)}, got '{job.kind}'; name another peer")
        cpus = pin_threads(job.threads)
        with contextlib.redirect_stdout(sys.stderr):  # peers print; stdout is the result's
            result = handlers[job.kind](job)
    except JobError as error:
        print(f"{peer}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    fixed = {"peer": peer, "kind": job.kind, "dtype": job.dtype, "threads": job.threads, "cpus": cpus}
    print(json.dumps(fixed | result), flush=True)
