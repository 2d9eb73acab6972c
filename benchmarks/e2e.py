"""`launch.bench e2e`: whole RL steps on real processes, with speculation off, with n-grams alone, and with all of TLT.

Each variant is one run of `launch.train` under `launch.local_cluster`, with the same configuration, seed and weights,
in a workdir of its own; they differ in what drafts and in who trains. Each runs twice, and the second run counts: its
programs are on disk by then, whichever variant came first. What was generated is compared response by response.

Regimes: `natural`, where the model ends its responses; `law`, where each ends at a length drawn from a long-tailed law
(`rl.lengths`) up to `rollout.max_tokens`.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow.parquet

from benchmarks import machine
from tlt_jax.metrics import read_jsonl

REGIMES = ("natural", "law")
_NGRAM_ARMS = "1: plain, ngram_3, ngram_7; 5: plain, ngram_3; 9: plain"
VARIANTS = {
    "plain": ("bandit.arms=1: plain", "drafter.enabled=false"),
    "ngram": (f"bandit.arms={_NGRAM_ARMS}", "drafter.enabled=false"),
    "tlt": ("drafter.enabled=true",),
}

Row = dict[str, Any]


class Run(NamedTuple):
    """What one variant left in its workdir."""

    metrics: list[Row]  # by step, from 1
    responses: list[Row]  # of all steps, in the order of requests


def e2e(
    config: str,
    overrides: Sequence[str],
    *,
    regime: str,
    processes: int,
    steps: int,
    warmup: int,
    variants: str,
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
      rehearse: run every variant once before those that count.
      variants: comma-separated names from `VARIANTS`; "plain" must be there.

    Raises:
      ValueError: bad arguments, or a run that failed.
    """
    names = [name.strip() for name in variants.split(",")]
    if regime not in REGIMES or "plain" not in names or not set(names) <= set(VARIANTS) or not 0 <= warmup < steps:
        raise ValueError(
            f"e2e: got regime {regime!r}, variants {names}, {warmup} warm-up steps of {steps}; expected one of "
            f"{REGIMES}, plain and others of {list(VARIANTS)}, and fewer warm-up steps than steps"
        )
    law = ("rl.length_law=reasoning",) if regime == "law" else ()
    common = (*overrides, *law, f"rl.num_steps={steps}", "checkpoint.every_steps=0")
    with tempfile.TemporaryDirectory(prefix="tlt_e2e_") as folder:
        runs: dict[str, Run] = {}
        for part in ("rehearsal", "run") if rehearse else ("run",):
            for name in names:
                workdir = pathlib.Path(folder) / part / name
                runs[name] = run_variant(config, (*common, *VARIANTS[name]), processes, workdir)
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
    """A finished run's metrics and responses."""
    metrics = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["step"] > 0]
    tables = [pyarrow.parquet.read_table(path).to_pylist() for path in sorted((workdir / "rollouts").glob("*.parquet"))]
    return Run(metrics, [row for table in tables for row in table])


def compare(runs: dict[str, Run], warmup: int) -> dict[str, Any]:
    """Fields of the result; times are medians over the steps after `warmup`."""
    plain = runs["plain"]
    plain_s = _median(plain, "time/step_s", warmup)
    result: dict[str, Any] = {
        "plain_step_s": plain_s,
        "rollout_share_plain": _median(plain, "time/rollout_s", warmup) / plain_s,
        "idle_frac_plain": _median(plain, "worker/idle_frac", warmup),
        "steps_by_variant": {name: _steps(run) for name, run in runs.items()},
    }
    for name, run in runs.items():
        if name != "plain":
            result[f"{name}_step_s"] = _median(run, "time/step_s", warmup)
            result[f"{name}_speedup"] = plain_s / result[f"{name}_step_s"]
            result[f"{name}_rollout_speedup"] = _median(plain, "time/rollout_s", warmup) / _median(
                run, "time/rollout_s", warmup
            )
            result |= {f"{name}_{key}": value for key, value in identity(plain, run).items()}
    best = "tlt" if "tlt" in runs else next((name for name in runs if name != "plain"), None)
    if best is not None:
        for key in ("speedup", "rollout_speedup", "tokens_identical_frac", "rewards_identical"):
            result[key] = result[f"{best}_{key}"]
        accept = [row["spec/accept_len"] for row in runs[best].metrics]
        result |= {
            "idle_used_frac": _median(runs[best], "worker/idle_used_frac", warmup),
            "accept_len_first": accept[0],
            "accept_len_last": accept[-1],
        }
    return result


def identity(a: Run, b: Run) -> dict[str, Any]:
    """How many responses of two runs are the same text of the same length, and where the first that differ are.

    A response that differs changes the policy from its step on, so later ones may differ for that reason alone:
    `first_difference` names the first step, and how many of its responses differ.
    """
    key = ("step", "request_id")
    pairs = list(zip(a.responses, b.responses, strict=True))
    assert all(ours[name] == theirs[name] for ours, theirs in pairs for name in key), "the runs had other requests"
    same = [all(ours[n] == theirs[n] for n in ("text", "response_len")) for ours, theirs in pairs]
    steps = [pair[0]["step"] for pair, is_same in zip(pairs, same, strict=True) if not is_same]
    return {
        "tokens_identical_frac": sum(same) / len(same),
        "rewards_identical": all(ours["reward"] == theirs["reward"] for ours, theirs in pairs),
        "first_difference": {"step": steps[0], "num_responses": steps.count(steps[0])} if steps else None,
        "num_tokens": sum(row["response_len"] for row in a.responses),
    }


def _median(run: Run, name: str, warmup: int) -> float:
    return statistics.median(row[name] for row in run.metrics[warmup:])


def _steps(run: Run) -> list[Row]:
    """Where the time of each step went, and what drafts were worth."""
    kept = ("time/", "worker/", "spec/", "drafter/", "compile/count")
    return [
        {"step": row["step"], "rollout/len_max": row["rollout/len_max"], "rollout/tokens": row["rollout/tokens"]}
        | {name: value for name, value in row.items() if name.startswith(kept)}
        for row in run.metrics
    ]
