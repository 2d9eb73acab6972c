"""What is made of the workdirs of an end-to-end comparison."""

import pytest

from benchmarks.e2e import Run, compare, e2e, identity


def make_run(step_s, rollout_s, texts=("a", "b"), accept=(1.0, 1.0, 1.0), reward=1.0):
    metrics = [
        {
            "step": step,
            "time/step_s": step_s * (5 if step == 1 else 1),  # the first compiles
            "time/rollout_s": rollout_s,
            "worker/idle_frac": 0.5,
            "worker/idle_used_frac": 0.25,
            "spec/accept_len": accept[step - 1],
            "rollout/len_max": 9,
            "rollout/tokens": 20,
            "rl/loss": 0.0,
        }
        for step in (1, 2, 3)
    ]
    responses = [
        {"step": step, "request_id": i, "text": text, "response_len": len(text), "reward": reward}
        for step in (1, 2, 3)
        for i, text in enumerate(texts)
    ]
    return Run(metrics, responses)


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


def test_responses_that_differ_are_counted_and_placed():
    plain, other = make_run(1.0, 1.0), make_run(1.0, 1.0)
    for row in other.responses[3:]:
        row["text"] = "other"
    found = identity(plain, other)
    assert found["tokens_identical_frac"] == 0.5 and found["rewards_identical"]
    assert found["first_difference"] == {"step": 2, "num_responses": 1} and found["num_tokens"] == 6
    assert identity(plain, plain)["first_difference"] is None
    assert not identity(plain, make_run(1.0, 1.0, reward=0.5))["rewards_identical"]


@pytest.mark.parametrize(
    ("regime", "variants", "warmup"),
    [("other", "plain", 0), ("law", "ngram", 0), ("law", "plain,x", 0), ("law", "plain", 2)],
)
def test_bad_arguments_are_refused(regime, variants, warmup):
    with pytest.raises(ValueError, match="e2e: got regime"):
        e2e("configs/quickstart.py", (), regime=regime, processes=2, steps=2, warmup=warmup, variants=variants)
