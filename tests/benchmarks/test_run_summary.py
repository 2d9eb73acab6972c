"""Workdirs as result files."""

import json

from benchmarks.run_summary import summarise


def write(workdir, rows):
    (workdir / "config.json").write_text('{"seed": 1}')
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return workdir


def test_a_run_is_its_curves(tmp_path):
    rows = [{"step": 0, "eval/mean_at_k": 0.25}]
    rows += [{"step": s, "rl/reward_mean": s / 10, "time/step_s": 2.0} for s in range(1, 9)]
    rows[-1]["eval/mean_at_k"] = 0.5
    found = summarise(write(tmp_path, rows))
    assert (found["num_steps"], found["train_seconds"], found["config"]) == (8, 16.0, {"seed": 1})
    assert (round(found["reward_first_quarter"], 3), round(found["reward_last_quarter"], 3)) == (0.15, 0.75)
    assert (found["eval_first"], found["eval_last"]) == (0.25, 0.5)
    assert found["columns"]["rl/reward_mean"] == [None, *(s / 10 for s in range(1, 9))]


def test_a_drafter_is_its_accept_length_against_tokens(tmp_path):
    rows = [
        {"step": 10 * i, "drafter/tokens": 100 * i, "drafter/accept_len": x, "drafter/accept/1": x / 4}
        for i, x in enumerate((1.0, 3.0, 2.0))
    ]
    found = summarise(write(tmp_path, rows))
    assert (found["accept_len_first"], found["accept_len_best"], found["tokens"]) == (1.0, 3.0, 200)
    assert found["columns"]["drafter/accept_len"] == [1.0, 3.0, 2.0]
    assert found["columns"]["drafter/accept/1"] == [0.25, 0.75, 0.5]
