"""`launch.bench e2e`: whole RL steps on real processes, with speculation off, with n-grams alone, and with all of TLT.

Each variant is one run of `launch.train` under `launch.local_cluster`, with the same configuration, seed and weights,
in a workdir of its own; they differ in what drafts and in who trains:

    plain     no drafts
    ngram     drafts from text alone
    tlt       a drafter from `cold`, which idle workers train
    frozen    the same drafter, left as it is
    tlt_warm  a drafter from `warm`, which idle workers train

Each is rehearsed for `REHEARSED_STEPS` steps before it counts: its programs are on disk by then. What was generated is
compared token by token, and times are totals over the steps that count, for steps differ in length.

Regimes: `natural`, where the model ends its responses; `law`, where each ends at a length drawn from a long-tailed law
(`rl.lengths`) up to `rollout.max_tokens`.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow.parquet

from benchmarks import machine
from launch.config import load_config
from launch.run_config import SCHEMA, make_run_config
from tlt_jax.metrics import read_jsonl

REGIMES = ("natural", "law")
REHEARSED_STEPS = 2
_NGRAM_ARMS = "1: plain, ngram_3, ngram_7; 5: plain, ngram_3; 9: plain"
VARIANTS = {
    "plain": ("bandit.arms=1: plain", "drafter.enabled=false"),
    "ngram": (f"bandit.arms={_NGRAM_ARMS}", "drafter.enabled=false"),
    "tlt": ("drafter.enabled=true", "drafter.path={cold}"),
    "frozen": ("drafter.enabled=true", "drafter.path={cold}", "coordinator.train=false"),
    "tlt_warm": ("drafter.enabled=true", "drafter.path={warm}"),
}
_BEST_FIRST = ("tlt_warm", "tlt", "ngram", "frozen")  # whose figures stand for the system's

Row = dict[str, Any]


class Run(NamedTuple):
    """What one variant left in its workdir."""

    metrics: list[Row]  # by step, from 1
    responses: list[Row]  # of all steps, in the order of requests
    timeline: list[Row]


def e2e(
    config: str,
    overrides: Sequence[str],
    *,
    regime: str,
    processes: int,
    steps: int,
    warmup: int,
    variants: str,
    cold: str = "",
    warm: str = "",
    rehearse: bool = True,
) -> dict[str, Any]:
    """All variants of one regime, and how they compare.

    Args:
      config: file of the run.
      overrides: `section.key=value` for all variants.
      regime: one of `REGIMES`.
      processes: of each job, a core each where there are as many.
      steps: RL steps of each variant.
      warmup: first steps that no time is taken of.
      variants: comma-separated names from `VARIANTS`; "plain" must be there.
      cold: drafter of `tlt` and `frozen`; empty takes random weights in the configured form.
      warm: drafter of `tlt_warm`.
      rehearse: run every variant for some steps before those that count.

    Raises:
      ValueError: bad arguments, a bad configuration, or a run that failed.
    """
    names = [name.strip() for name in variants.split(",")]
    if regime not in REGIMES or "plain" not in names or not set(names) <= set(VARIANTS) or not 0 <= warmup < steps:
        raise ValueError(
            f"e2e: got regime {regime!r}, variants {names}, {warmup} warm-up steps of {steps}; expected one of "
            f"{REGIMES}, plain and others of {list(VARIANTS)}, and fewer warm-up steps than steps"
        )
    if "tlt_warm" in names and not warm:
        raise ValueError("e2e: got variant tlt_warm without a drafter; expected --warm=DIR, from launch.train_drafter")
    run = make_run_config(load_config(config, overrides, SCHEMA))
    if run.drafter.draft_vocab_size and not cold and {"tlt", "frozen"} & set(names):
        raise ValueError(
            f"e2e: got drafter.draft_vocab_size {run.drafter.draft_vocab_size} and no drafter to start from; expected "
            "--cold=DIR, from launch.train_drafter with drafter.warmup.num_steps=1, which chooses the ids"
        )
    law = ("rl.length_law=reasoning",) if regime == "law" else ()
    common = (*overrides, *law, "checkpoint.every_steps=0")
    with tempfile.TemporaryDirectory(prefix="tlt_e2e_") as folder:
        runs: dict[str, Run] = {}
        for part, num in (("rehearsal", min(REHEARSED_STEPS, steps)), ("run", steps))[0 if rehearse else 1 :]:
            for name in names:
                own = [o.format(cold=cold, warm=warm) for o in VARIANTS[name]]
                workdir = pathlib.Path(folder) / part / name
                runs[name] = run_variant(config, (*common, f"rl.num_steps={num}", *own), processes, workdir)
    facts = {"regime": regime, "config": config, "overrides": list(common), "processes": processes, "steps": steps}
    return facts | {"warmup": warmup} | compare(runs, warmup) | {"machine": machine.describe()}


def run_variant(config: str, overrides: Sequence[str], processes: int, workdir: pathlib.Path) -> Run:
    """One job from start to end.

    Raises:
      ValueError: it failed; its last words.
    """
    command = [sys.executable, "-m", "launch.local_cluster", f"--processes={processes}"]
    command += ["--pin"] if machine.num_cores() >= processes else []
    command += ["--", sys.executable, "-m", "launch.train", f"--config={config}", f"--workdir={workdir}"]
    done = subprocess.run([*command, *(f"--config.{o}" for o in overrides)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"e2e: the run {workdir.name} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    return read_run(workdir)


def read_run(workdir: pathlib.Path) -> Run:
    """A finished run's metrics, responses and timeline."""
    metrics = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["step"] > 0]
    tables = [pyarrow.parquet.read_table(path).to_pylist() for path in sorted((workdir / "rollouts").glob("*.parquet"))]
    return Run(metrics, [row for table in tables for row in table], list(read_jsonl(workdir / "timeline.jsonl")))


def compare(runs: dict[str, Run], warmup: int) -> dict[str, Any]:
    """Fields of the result; times are means over the steps after `warmup`."""
    plain = runs["plain"]
    plain_s = _mean(plain, "time/step_s", warmup)
    result: dict[str, Any] = {
        "plain_step_s": plain_s,
        "rollout_share_plain": _mean(plain, "time/rollout_s", warmup) / plain_s,
        "idle_frac_plain": _mean(plain, "worker/idle_frac", warmup),
        "by_variant": {name: _summary(run, warmup) for name, run in runs.items()},
        "steps_by_variant": {name: _steps(run) for name, run in runs.items()},
    }
    for name, run in runs.items():
        if name != "plain":
            result[f"{name}_step_s"] = _mean(run, "time/step_s", warmup)
            result[f"{name}_speedup"] = plain_s / result[f"{name}_step_s"]
            rollout_s = _mean(run, "time/rollout_s", warmup)
            result[f"{name}_rollout_speedup"] = _mean(plain, "time/rollout_s", warmup) / rollout_s
            result |= {f"{name}_{key}": value for key, value in identity(plain, run).items()}
    best = next((name for name in _BEST_FIRST if name in runs), None)
    if best is not None:
        result["best"] = best
        for key in ("speedup", "rollout_speedup", "tokens_identical_frac", "rewards_identical"):
            result[key] = result[f"{best}_{key}"]
        result["idle_used_frac"] = _mean(runs[best], "worker/idle_used_frac", warmup)
        online = "tlt" if "tlt" in runs else best
        accept = [row["spec/accept_len"] for row in runs[online].metrics]
        result |= {"accept_len_first": accept[0], "accept_len_last": accept[-1]}
    return result


def identity(a: Run, b: Run) -> dict[str, Any]:
    """How many responses of two runs are the same token ids, and where the first that differ are.

    A response that differs changes the policy from the next step on, so later ones may differ for that reason alone:
    `first_difference` names the first step with any, how many of its responses differ, and the positions in them; and
    the rate is over the tokens up to that step's end.
    """
    key = ("step", "request_id")
    pairs = list(zip(a.responses, b.responses, strict=True))
    assert all(ours[name] == theirs[name] for ours, theirs in pairs for name in key), "the runs had other requests"
    parted = [(ours, theirs) for ours, theirs in pairs if ours["token_ids"] != theirs["token_ids"]]
    first = min((ours["step"] for ours, _ in parted), default=None)
    here = [_first_unequal(ours["token_ids"], theirs["token_ids"]) for ours, theirs in parted if ours["step"] == first]
    num_tokens = sum(row["response_len"] for row in a.responses if first is None or row["step"] <= first)
    return {
        "tokens_identical_frac": 1.0 - len(parted) / len(pairs),
        "rewards_identical": all(ours["reward"] == theirs["reward"] for ours, theirs in pairs),
        "first_difference": {"step": first, "num_responses": len(here), "positions": here} if parted else None,
        "first_divergences_per_100k_tokens": 1e5 * len(here) / num_tokens,
        "num_tokens": sum(row["response_len"] for row in a.responses),
    }


def _first_unequal(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _mean(run: Run, name: str, warmup: int) -> float:
    rows = run.metrics[warmup:]
    return math.fsum(row[name] for row in rows) / len(rows)


def _summary(run: Run, warmup: int) -> dict[str, Any]:
    """Where a variant's time went, over the steps that count, and what its drafts were worth, step by step."""
    step_s = _mean(run, "time/step_s", warmup)
    parts = {name: _mean(run, name, warmup) for name in run.metrics[-1] if name.startswith("time/")}
    return {
        "parts_of_step": {name.removeprefix("time/"): s / step_s for name, s in parts.items() if name != "time/step_s"},
        "idle_frac": _mean(run, "worker/idle_frac", warmup),
        "idle_used_frac": _mean(run, "worker/idle_used_frac", warmup),
        "accept_len_by_step": [row["spec/accept_len"] for row in run.metrics],
        "drafter_accept_len_by_step": [_drafter_accept_len(row) for row in run.metrics],
        "held_out_accept_len_by_step": [row.get("drafter/accept_after") for row in run.metrics],
        "seconds_in_state_by_worker": time_in_states(run.timeline),
    }


def _drafter_accept_len(row: Row) -> float | None:
    """Tokens per live row and round of the strategies that the drafter served; None where there were none."""
    total = {"row_rounds": 0.0, "tokens": 0.0}
    for name, count in row.items():
        for kind in total:
            prefix = f"spec/arm_{kind}/"
            if name.startswith(prefix) and not name.removeprefix(prefix).startswith(("plain", "ngram")):
                total[kind] += count
    return total["tokens"] / total["row_rounds"] if total["row_rounds"] else None


def time_in_states(timeline: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Seconds of each worker in each state, from its first change to the last one of the run."""
    end_s = max((row["t_s"] for row in timeline), default=0.0)
    seconds: dict[str, dict[str, float]] = {}
    for worker in sorted({row["worker"] for row in timeline}):
        rows = [row for row in timeline if row["worker"] == worker]
        states = seconds[str(worker)] = dict.fromkeys(sorted({row["state"] for row in rows}), 0.0)
        for row, until_s in itertools.zip_longest(rows, [row["t_s"] for row in rows[1:]], fillvalue=end_s):
            states[row["state"]] += until_s - row["t_s"]
    return seconds


def _steps(run: Run) -> list[Row]:
    """Where the time of each step went, and what drafts were worth."""
    kept = ("time/", "worker/", "spec/", "drafter/", "compile/count")
    return [
        {"step": row["step"], "rollout/len_max": row["rollout/len_max"], "rollout/tokens": row["rollout/tokens"]}
        | {name: value for name, value in row.items() if name.startswith(kept)}
        for row in run.metrics
    ]
