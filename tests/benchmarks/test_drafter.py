"""Packed against padded training on a tiny model: equal work, and figures that agree with each other."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import drafter
from launch import bench
from launch.run_config import make_run_config
from tests import tiny_model
from tests.drafter.shapes import make
from tlt_jax.drafter.packing import BatchConfig, fill_frac

BATCH = {"row_len": 64, "context_len": 4, "num_rows": 2, "num_micro": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tiny_model.make_files(tmp_path_factory.mktemp("bench"))


def tiny_sections(root):
    return tiny_model.sections(
        root, drafter={"batch": BATCH, "loss": {"num_steps": 1}}, reward={"weights": {"number": 1.0}}
    )


def test_all_ways_train_on_the_same_rows():
    windows = drafter.make_windows(make()[0], 64, 8, 40, seed=0)
    lens = [w.num_rows for w in windows]
    assert len(windows) == 40 and min(lens) >= 9 and np.median(lens) < 16 < max(lens) <= 64
    assert all((w.start, w.first) == (0, 7) for w in windows)
    found = {}
    for name, batches in drafter.make_contestants(windows, BatchConfig(**BATCH)).items():
        found[name] = list(batches())
        assert sum(int(b.mask.sum()) for b in found[name]) == sum(w.last - w.first for w in windows)
        assert sum(int((b.segment_ids > 0).sum()) for b in found[name]) == sum(lens)
    assert {b.tokens.shape for b in found["packed"]} == {(2, 2, 64)}
    assert len(found["padded"]) == len(found["packed"])
    assert len(found["padded_small"]) == 20 and {b.tokens.shape[:2] for b in found["padded_small"]} == {(1, 2)}
    for batch in found["padded"] + found["padded_small"]:
        longest = int((batch.segment_ids > 0).sum(-1).max())
        assert batch.tokens.shape[-1] == -(-longest // 8) * 8
    fill = {
        name: np.average([fill_frac(b) for b in x], weights=[b.tokens.size for b in x]) for name, x in found.items()
    }
    assert fill["packed"] > fill["padded_small"] > fill["padded"]


def test_a_prompt_needs_room_for_a_response():
    with pytest.raises(ValueError, match="got 4 sequences with prompts of 63 tokens for rows of 64"):
        drafter.make_windows(make()[0], 64, 63, 4, seed=0)
    (window,) = drafter.make_windows(make()[0], 64, 62, 1, seed=0)
    assert window.num_rows <= 64


def test_the_result_agrees_with_itself(root, tmp_path, capsys, monkeypatch):
    """By the command; packed rows are fuller, times are not asserted."""
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    config = tiny_model.write_config(tmp_path / "tiny.py", tiny_sections(root))
    argv = ["drafter", f"--config={config}", "--sequences=10", "--prompt-len=8", "--repeats=2"]
    assert bench.main([*argv, "config.drafter.draft_vocab_size=24"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("packed", "padded", "padded_small"):
        assert len(result["walls_s"][name]) == result["repeats"] == 2 and result["compile_s"][name] >= 0.0
        assert result[f"{name}_samples_s"] == pytest.approx(10 / np.median(result["walls_s"][name]))
        assert result[f"{name}_tok_s"] == pytest.approx(result[f"{name}_samples_s"] * result["tokens"] / 10)
    assert result["ratio"] == pytest.approx(result["packed_samples_s"] / result["padded_samples_s"])
    assert result["ratio_small"] == pytest.approx(result["packed_samples_s"] / result["padded_small_samples_s"])
    assert 0.0 < result["fill"]["padded"] <= result["fill"]["padded_small"] < 1.0
    assert (result["draft_vocab_size"], result["vocab_size"], result["batch"]["row_len"]) == (24, 56, 64)
    assert bench.main([*argv, "--prompt-len=64"]) == 2
    assert "prompts of 64 tokens" in capsys.readouterr().err


def test_other_forms_have_their_features():
    windows = drafter.make_windows(make("eagle3")[0], 32, 4, 3, seed=1)
    assert all(w.trace.features.shape[1] == 96 and w.trace.hidden.shape[1] == 32 for w in windows)


def test_weights_have_the_models_sizes(root):
    run = make_run_config(tiny_sections(root))
    sized = drafter.make_sized(dataclasses.replace(run, model=dataclasses.replace(run.model, dtype="bfloat16")))
    assert set(sized.frozen) == {"embed"} and sized.frozen["embed"]["weight"].shape == (56, 32)
    assert sized.frozen["embed"]["weight"].dtype == "bfloat16"
    assert sized.facts()["draft_vocab_size"] == 56
