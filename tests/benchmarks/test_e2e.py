"""What is made of the workdirs of an end-to-end comparison."""

import pytest

from benchmarks.e2e import Run, compare, e2e, identity, time_in_states


def make_run(step_s, rollout_s, token_ids=((1,), (2, 3)), accept=(1.0, 1.0, 1.0), reward=1.0):
    metrics = [
        {
            "step": step,
            "time/step_s": step_s * (5 if step == 1 else 1),  # the first compiles
            "time/rollout_s": rollout_s,
            "worker/idle_frac": 0.5,
            "worker/idle_used_frac": 0.25,
            "spec/accept_len": accept[step - 1],
            "spec/arm_tokens/plain": 10,
            "spec/arm_row_rounds/plain": 10,
            "rollout/len_max": 9,
            "rollout/tokens": 20,
            "rl/loss": 0.0,
        }
        for step in (1, 2, 3)
    ]
    responses = [
        {"step": step, "request_id": i, "token_ids": list(ids), "response_len": len(ids), "reward": reward}
        for step in (1, 2, 3)
        for i, ids in enumerate(token_ids)
    ]
    return Run(metrics, responses, [])


def test_figures_are_of_the_steps_after_the_warm_up():
    runs = {
        "plain": make_run(10.0, 8.0),
        "ngram": make_run(8.0, 6.0),
        "tlt": make_run(5.0, 2.0, accept=(2.0, 3.0, 4.0)),
    }
    result = compare(runs, warmup=1)
    assert (result["plain_step_s"], result["ngram_step_s"], result["tlt_step_s"]) == (10.0, 8.0, 5.0)
    assert (result["speedup"], result["rollout_speedup"], result["rollout_share_plain"]) == (2.0, 4.0, 0.8)
    assert (result["idle_frac_plain"], result["idle_used_frac"]) == (0.5, 0.25)
    assert (result["accept_len_first"], result["accept_len_last"]) == (2.0, 4.0)
    assert (result["tokens_identical_frac"], result["rewards_identical"]) == (1.0, True)
    assert [row["time/step_s"] for row in result["steps_by_variant"]["tlt"]] == [25.0, 5.0, 5.0]
    assert "rl/loss" not in result["steps_by_variant"]["tlt"][0]
    assert result["by_variant"]["ngram"]["parts_of_step"] == {"rollout_s": 0.75}


def test_times_are_totals_for_steps_differ_in_length():
    plain, fast = make_run(10.0, 8.0), make_run(5.0, 2.0)
    plain.metrics[2]["time/step_s"] = 30.0
    assert compare({"plain": plain, "ngram": fast}, warmup=1)["speedup"] == 4.0


def test_a_warm_drafter_stands_for_the_system_and_a_cold_one_shows_how_it_learns():
    runs = {
        "plain": make_run(10.0, 8.0),
        "tlt": make_run(5.0, 2.0, accept=(1.0, 2.0, 3.0)),
        "tlt_warm": make_run(4.0, 1.0, accept=(5.0, 5.0, 5.0)),
    }
    for step, row in enumerate(runs["tlt"].metrics):
        row |= {"spec/arm_tokens/chain_3": 6 * (step + 1), "spec/arm_row_rounds/chain_3": 6}
    result = compare(runs, warmup=1)
    assert (result["best"], result["speedup"], result["accept_len_first"], result["accept_len_last"]) == (
        *("tlt_warm", 2.5),
        *(1.0, 3.0),
    )
    assert result["by_variant"]["tlt"]["drafter_accept_len_by_step"] == [1.0, 2.0, 3.0]
    assert result["by_variant"]["plain"]["drafter_accept_len_by_step"] == [None] * 3


def test_responses_that_differ_are_counted_and_placed():
    plain, other = make_run(1.0, 1.0), make_run(1.0, 1.0)
    for row in other.responses[3:]:
        row["token_ids"] = [row["token_ids"][0], 9]
    found = identity(plain, other)
    assert found["tokens_identical_frac"] == 0.5 and found["rewards_identical"]
    assert found["first_difference"] == {"step": 2, "num_responses": 1, "positions": [1]} and found["num_tokens"] == 9
    assert found["first_divergences_per_100k_tokens"] == pytest.approx(1e5 / 6)
    assert identity(plain, plain)["first_difference"] is None
    assert identity(plain, plain)["first_divergences_per_100k_tokens"] == 0.0
    assert not identity(plain, make_run(1.0, 1.0, reward=0.5))["rewards_identical"]


def test_every_second_of_a_worker_belongs_to_a_state():
    changes = [(0.0, 0, "busy"), (0.5, 1, "busy"), (2.0, 1, "idle"), (3.0, 1, "training"), (4.5, 0, "learning")]
    timeline = [{"t_s": t_s, "worker": worker, "state": state} for t_s, worker, state in changes]
    assert time_in_states(timeline) == {
        "0": {"busy": 4.5, "learning": 0.0},
        "1": {"busy": 1.5, "idle": 1.0, "training": 1.5},
    }


@pytest.mark.parametrize(
    ("regime", "variants", "warmup", "words"),
    [
        ("other", "plain", 0, "got regime"),
        ("law", "ngram", 0, "got regime"),
        ("law", "plain,x", 0, "got regime"),
        ("law", "plain", 2, "got regime"),
        ("law", "plain,tlt_warm", 0, "expected --warm=DIR"),
    ],
)
def test_bad_arguments_are_refused(regime, variants, warmup, words):
    with pytest.raises(ValueError, match=words):
        e2e("configs/quickstart.py", (), regime=regime, processes=2, steps=2, warmup=warmup, variants=variants)


def test_ids_that_follow_from_data_need_a_drafter_that_has_them():
    with pytest.raises(ValueError, match=r"got drafter.draft_vocab_size 512 and no drafter .*; expected --cold=DIR"):
        e2e("configs/longtail.py", (), regime="law", processes=2, steps=2, warmup=1, variants="plain,tlt")
