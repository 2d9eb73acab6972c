"""A run's workdir as one result file: `python -m benchmarks.run_summary WORKDIR --json=FILE [--note=TEXT]`.

Holds the configuration, the machine, and per step the rewards, lengths and times, so that the curve can be drawn again;
of a workdir of `launch.train_drafter` the held-out accept length and agreement against the tokens trained on.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from benchmarks import machine
from tlt_jax.metrics import read_jsonl

_COLUMNS = (
    "rl/reward_mean", "eval/mean_at_k", "eval/pass_at_1", "rollout/len_mean", "rollout/len_max", "rollout/tokens_per_s",
    "rollout/truncated_frac", "rl/entropy", "rl/grad_norm", "rl/logprob_gap", "time/step_s", "time/rollout_s",
    "time/update_s", "compile/count", "memory/host_bytes",
)  # fmt: skip


_DRAFTER = "drafter/accept_len"
_DRAFTER_COLUMNS = ("drafter/tokens", _DRAFTER, "drafter/eval_loss", "drafter/loss", "drafter/overlap")
_BY_POSITION = ("accept", "top1", "top3")


def summarise(workdir: pathlib.Path) -> dict:
    """Columns over steps; None where a step has no such metric (evaluations are sparse)."""
    rows = read_jsonl(workdir / "metrics.jsonl")
    if rows and _DRAFTER in rows[0]:
        return _summarise_drafter(workdir, rows)
    rewards = [row["rl/reward_mean"] for row in rows if "rl/reward_mean" in row]
    evals = [row["eval/mean_at_k"] for row in rows if "eval/mean_at_k" in row]
    quarter = max(1, len(rewards) // 4)
    return {
        "num_steps": len(rewards),
        "train_seconds": sum(row.get("time/step_s", 0.0) for row in rows),
        "reward_first_quarter": sum(rewards[:quarter]) / quarter,
        "reward_last_quarter": sum(rewards[-quarter:]) / quarter,
        "eval_first": evals[0] if evals else None,
        "eval_last": evals[-1] if evals else None,
        "config": json.loads((workdir / "config.json").read_text()),
        "machine": machine.describe(),
        "steps": [row["step"] for row in rows],
        "columns": {name: [row.get(name) for row in rows] for name in _COLUMNS},
    }


def _summarise_drafter(workdir: pathlib.Path, rows: list[dict]) -> dict:
    by_position = [name for name in rows[0] if name.startswith(tuple(f"drafter/{kind}/" for kind in _BY_POSITION))]
    return {
        "accept_len_first": rows[0][_DRAFTER],
        "accept_len_best": max(row[_DRAFTER] for row in rows),
        "tokens": rows[-1]["drafter/tokens"],
        "config": json.loads((workdir / "config.json").read_text()),
        "machine": machine.describe(),
        "steps": [row["step"] for row in rows],
        "columns": {name: [row.get(name) for row in rows] for name in (*_DRAFTER_COLUMNS, *by_position)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.run_summary")
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--note", default="", help="what a reader should know of the circumstances")
    args = parser.parse_args()
    result = summarise(args.workdir) | {"note": args.note}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("config", "steps", "columns")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
