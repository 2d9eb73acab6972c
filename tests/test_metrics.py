import json
import math

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

from tlt_jax import files, metrics, types

COLUMNS = [
    "step",
    "prompt_id",
    "request_id",
    "sample",
    "worker",
    "policy_version",
    "prompt_len",
    "response_len",
    "finish_reason",
    "reward",
    "advantage",
    "rounds",
    "drafted",
    "accepted",
    "accept_len",
    "start_s",
    "end_s",
    "text",
    "prompt_ids",
    "token_ids",
]


def _completion(request_id: int = 7, num_tokens: int = 4) -> types.Completion:
    return types.Completion(
        request_id=request_id,
        prompt_id=3,
        sample=1,
        prompt_ids=(5, 6, 7),
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        finish_reason="stop",
        policy_version=2,
        rounds=2,
        drafted=6,
        accepted=2,
        start_s=0.5,
        end_s=1.5,
    )


def test_one_row_per_step_as_plain_numbers(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    written = writer.write(0, {"rl/loss": jnp.float32(0.5), "rollout/tokens": np.int64(12), "spec/arm/tree:4x3": 2})
    writer.write(1, {"rl/loss": 0.25})
    writer.close()
    assert written == {"rl/loss": 0.5, "rollout/tokens": 12, "spec/arm/tree:4x3": 2}
    assert metrics.read_jsonl(tmp_path / "metrics.jsonl") == [
        {"step": 0, "rl/loss": 0.5, "rollout/tokens": 12, "spec/arm/tree:4x3": 2},
        {"step": 1, "rl/loss": 0.25},
    ]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("Loss", 1.0, "got name 'Loss'"),
        ("step", 1, "got name 'step'"),
        ("rl/loss", np.zeros(2), "expected one number"),
        ("rl/ok", True, "expected one number"),
        ("rl/name", "high", "expected one number"),
    ],
)
def test_a_name_or_value_of_another_form_is_refused(tmp_path, name, value, message):
    writer = metrics.MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match=message):
        writer.write(0, {name: value})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_step_is_written_once_and_in_order(tmp_path):
    """H7: one unit, the RL step, on the axis of every metric."""
    writer = metrics.MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, {"rl/loss": float(step)})
    with pytest.raises(ValueError, match="got step 3 after step 3"):
        writer.write(3, {"rl/loss": 0.0})
    writer.close()
    assert [row["step"] for row in metrics.read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_number_that_is_not_finite_becomes_null(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    row = writer.write(0, {"rl/loss": math.nan, "rl/kl": math.inf, "rl/entropy": 1.0})
    writer.close()
    assert math.isnan(row["rl/loss"])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 0,
        "rl/loss": None,
        "rl/kl": None,
        "rl/entropy": 1.0,
    }


def test_resume_removes_rows_that_will_be_written_again_and_a_cut_line(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    for step in range(5):
        writer.write(step, {"rl/loss": float(step)})
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "rl/lo')
    writer = metrics.MetricsWriter(tmp_path, first_step=3)
    writer.write(3, {"rl/loss": -3.0})
    writer.close()
    assert [(row["step"], row["rl/loss"]) for row in metrics.read_jsonl(tmp_path / "metrics.jsonl")] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, -3),
    ]


def test_only_the_writing_process_touches_the_disk(tmp_path):
    """E4: every process calls, one writes."""
    other = metrics.MetricsWriter(tmp_path / "x", is_writer=False)
    assert other.write(0, {"rl/loss": 1.0}) == {"rl/loss": 1.0}
    other.close()
    metrics.RolloutWriter(tmp_path / "x", is_writer=False).write(0, [_completion()], ["a"], [1.0], [0.0])
    metrics.TimelineWriter(tmp_path / "x", is_writer=False).write(0.0, worker=0, state="BUSY", step=0)
    assert not (tmp_path / "x").exists()


def test_rollouts_have_exactly_the_documented_columns(tmp_path):
    path = metrics.RolloutWriter(tmp_path).write(
        4, [_completion(7), _completion(8, 2)], ["ab", "c"], [1.0, 0.0], np.array([0.5, -0.5])
    )
    assert path == tmp_path / "rollouts" / "step_000004.parquet"
    table = pq.read_table(path)
    assert table.column_names == COLUMNS
    first, second = table.to_pylist()
    assert first == {
        "step": 4, "prompt_id": 3, "request_id": 7, "sample": 1, "worker": 0, "policy_version": 2, "prompt_len": 3,
        "response_len": 4, "finish_reason": "stop", "reward": 1.0, "advantage": 0.5, "rounds": 2, "drafted": 6,
        "accepted": 2, "accept_len": 2.0, "start_s": 0.5, "end_s": 1.5, "text": "ab",
        "prompt_ids": [5, 6, 7], "token_ids": [0, 1, 2, 3],
    }  # fmt: skip
    assert (second["request_id"], second["response_len"], second["accept_len"], second["text"]) == (8, 2, 1.0, "c")


def test_rollout_columns_of_unequal_length_are_refused(tmp_path):
    """G8: one score per row, or an error; never shifted rows."""
    with pytest.raises(ValueError, match="got 1 rewards for 2 completions"):
        metrics.RolloutWriter(tmp_path).write(0, [_completion(), _completion(8)], ["a", "b"], [1.0], [0.0, 0.0])
    assert not (tmp_path / "rollouts").exists()


def test_resume_removes_rollouts_of_steps_to_come(tmp_path):
    writer = metrics.RolloutWriter(tmp_path)
    for step in range(4):
        writer.write(step, [_completion()], ["a"], [1.0], [0.0])
    metrics.RolloutWriter(tmp_path, first_step=2)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "step_000000.parquet",
        "step_000001.parquet",
    ]


def test_timeline_goes_on_after_a_resume(tmp_path):
    writer = metrics.TimelineWriter(tmp_path)
    writer.write(0.0, worker=0, state="BUSY", step=0)
    writer.write(2.5, worker=0, state="TRAINING", step=0, window_id=1)
    writer.write(4.0, worker=0, state="BUSY", step=1)
    writer.close()
    writer = metrics.TimelineWriter(tmp_path, first_step=1)
    writer.write(0.25, worker=0, state="BUSY", step=1)
    writer.close()
    rows = metrics.read_jsonl(tmp_path / "timeline.jsonl")
    assert [(row["t_s"], row["state"], row["window_id"], row["step"]) for row in rows] == [
        (0.0, "BUSY", None, 0),
        (2.5, "TRAINING", 1, 0),
        (2.75, "BUSY", None, 1),
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    files.write_text(tmp_path / "a.json", "old")
    with pytest.raises(RuntimeError, match="disk"), files.atomic_path(tmp_path / "a.json") as temporary:
        temporary.write_text("half")
        raise RuntimeError("disk")
    assert (tmp_path / "a.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_memory_counts_arrays_that_are_alive():
    before = metrics.memory_metrics()
    array = jnp.zeros((1000, 1000), jnp.float32)
    after = metrics.memory_metrics()
    assert after["memory/live_arrays"] - before["memory/live_arrays"] == 1
    assert after["memory/device_bytes"] - before["memory/device_bytes"] == array.nbytes
    assert after["memory/host_bytes"] > 50e6
