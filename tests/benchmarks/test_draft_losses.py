"""The comparison of losses on a tiny model: equal data and start, and figures that agree with each other."""

import pytest

from benchmarks import draft_losses
from launch.run_config import make_run_config
from tests import tiny_model

DRAFTER = {
    "loss": {"num_steps": 1, "chunk_rows": 32},
    "draft_vocab_size": 24,
    "batch": {"row_len": 32, "context_len": 4, "num_rows": 2},
    "warmup": {"held_out": 2, "samples": 2, "optim": {"learning_rate": 1e-2}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tiny_model.make_files(tmp_path_factory.mktemp("bench"))
    return make_run_config(tiny_model.sections(root, drafter=DRAFTER, reward={"weights": {"number": 1.0}}))


@pytest.mark.slow
def test_losses_start_alike_and_train_as_long(run, monkeypatch):
    """By the same steps on the same tokens they come to different drafters; the named ones are the best."""
    tiny_model.share_programs(monkeypatch)
    result = draft_losses.losses(run, ["soft_ce", "coupling"], steps=5, num_prompts=6, looks=2)
    rows = result["rows"]
    assert set(rows) == {"soft_ce", "coupling"} and result["num_sequences"] == 12
    assert 0 < result["held_out_tokens"] < result["num_tokens"] <= 12 * 12
    for row in rows.values():
        assert [point["step"] for point in row["curve"]] == [0, 2, 5]
        assert row["curve"][0]["train_s"] == 0.0 and row["curve"][0]["accept_len"] == result["accept_len_start"]
        assert all(1.0 <= point["accept_len"] <= 6.0 for point in row["curve"])
        assert row["accept_len"] == row["curve"][-1]["accept_len"]
        gain = row["accept_len"] - result["accept_len_start"]
        assert row["gain_per_s"] == pytest.approx(gain / row["train_s"]) and row["train_s"] > 0.0
    assert rows["soft_ce"]["tokens"] == rows["coupling"]["tokens"] > 0
    assert rows["soft_ce"]["accept_len"] != rows["coupling"]["accept_len"]
    for key in ("accept_len", "gain_per_s"):
        assert rows[result[f"best_{key}"]][key] == max(row[key] for row in rows.values())


def test_bad_requests_are_refused_before_anything_is_generated(run):
    with pytest.raises(ValueError, match="got 'kl', expected one of soft_ce, tv"):
        draft_losses.losses(run, ["kl"], steps=2, num_prompts=4, looks=1)
    with pytest.raises(ValueError, match="got 3 looks at 2 steps"):
        draft_losses.losses(run, ["tv"], steps=2, num_prompts=4, looks=3)
