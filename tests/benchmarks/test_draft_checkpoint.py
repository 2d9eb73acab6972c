"""What the checkpoint benchmark writes and says, on a tiny model."""

import numpy as np
import pytest

from benchmarks import draft_checkpoint
from launch.run_config import make_run_config
from tests import tiny_model

METHODS = ("sync_full", "async_full", "async_selective", "window_snapshot")


def test_the_result_agrees_with_itself(tmp_path):
    """Bytes are those of f32 weights and two moments, with the frozen embedding or without; nothing is left behind."""
    (tmp_path / "files").mkdir()
    root = tiny_model.make_files(tmp_path / "files")
    run = make_run_config(tiny_model.sections(root, reward={"weights": {"number": 1.0}}))
    (tmp_path / "here").mkdir()
    result = draft_checkpoint.checkpoint(run, 3, str(tmp_path / "here"))
    assert list((tmp_path / "here").iterdir()) == [] and result["directory"] == str(tmp_path / "here")
    for name in METHODS:
        assert len(result["blocked_ms"][name]) == result["repeats"] == 3
        assert result[f"{name}_ms"] == np.median(result["blocked_ms"][name]) > 0.0
        assert result["written_ms"][name] >= result[f"{name}_ms"]
    assert result["ratio"] == pytest.approx(result["sync_full_ms"] / result["async_selective_ms"])
    num_bytes, trainable = result["num_bytes"], 4 * result["trainable_params"]
    assert num_bytes["window_snapshot"] == trainable
    assert num_bytes["async_full"] == num_bytes["sync_full"] == num_bytes["async_selective"] + 4 * 56 * 32
    assert 3 * trainable <= num_bytes["async_selective"] <= 3 * trainable + 64
