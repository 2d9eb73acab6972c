"""Requests, scores in their places, groups and statistics."""

import dataclasses

import numpy as np
import pytest

from tests.coordinator.engines import CountingEngine
from tests.tiny_model import LocalRewards
from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.coordinator.store import LocalStore
from tlt_jax.rl.advantages import find_constant_groups
from tlt_jax.rl.evaluate import EvalConfig, evaluate
from tlt_jax.rl.experience import EVAL_REQUEST_ID, collect, concat, make_requests, rollout_metrics, take_groups
from tlt_jax.rl.tasks import Prompt
from tlt_jax.types import SamplingParams

SAMPLING = SamplingParams(max_tokens=8, top_p=0.5)
PROMPTS = [Prompt(prompt_id=i, token_ids=(i + 1,), text=str(i), reference={"answer": i}) for i in (7, 3, 7)]


def score(text, reference):
    """Engines answer a request with its id; the reward tells which text met which reference."""
    return int(text) + reference["answer"] / 100


def run(num_workers=1, first_id=40, prompts=PROMPTS):
    workers = WorkerPool([CountingEngine(i) for i in range(num_workers)])
    requests = make_requests(prompts, 2, SAMPLING, first_id)
    return collect(workers, LocalRewards(score), prompts, requests, lambda ids: str(ids[0]))


def test_requests_count_up_and_a_prompt_drawn_twice_makes_two_groups():
    """C10: ids, and so the noise, come from the first id and the place alone."""
    requests = make_requests(PROMPTS, 2, SAMPLING, 40)
    assert [(r.request_id, r.prompt_id, r.sample) for r in requests] == [
        (40, 0, 0),
        (41, 0, 1),
        (42, 1, 0),
        (43, 1, 1),
        (44, 2, 0),
        (45, 2, 1),
    ]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_scores_lie_beside_their_responses(num_workers):
    """B23, G8: one score per response, in the order of the requests whatever finished first."""
    scored = run(num_workers)
    assert scored.texts == ("40", "41", "42", "43", "44", "45")
    np.testing.assert_allclose(scored.rewards, [40.07, 41.07, 42.03, 43.03, 44.07, 45.07], rtol=1e-6)
    assert [c.prompt_id for c in scored.completions] == [7, 7, 3, 3, 7, 7]
    assert scored.rewards_PR.shape == (3, 2) and scored.reward_status == ("ok",) * 6


def test_processes_decide_alike_whatever_their_own_share_says(job):
    """E1, E9: whether another batch is drawn follows from everybody's rewards, which all have."""
    store, shares = LocalStore(), {}

    def process(group):
        engine = CountingEngine(group.index, rows=1, step_s=0.03)
        workers = WorkerPool([engine], store=store, num_workers=2, is_leader=group.is_first)
        rewards = LocalRewards(lambda text, _: min(int(text), 43))  # the last group scores alike
        requests = make_requests(PROMPTS, 2, SAMPLING, 40)
        scored = collect(workers, rewards, PROMPTS, requests, lambda ids: str(ids[0]), group=group)
        shares[group.index] = engine.num_done
        return scored.rewards.tolist(), find_constant_groups(scored.rewards_PR).tolist()

    (ours, theirs), _ = job(process)
    assert ours == theirs == ([40.0, 41.0, 42.0, 43.0, 43.0, 43.0], [False, False, True])
    assert sorted(shares) == [0, 1] and sum(shares.values()) == 6 and min(shares.values()) > 0


def test_groups_are_taken_and_joined_whole():
    """B23: rows stay with their prompt."""
    both = concat([run(), run(first_id=60)])
    assert len(both.prompts) == 6 and both.texts[6] == "60"
    kept = take_groups(both, [4, 1])
    assert [p.prompt_id for p in kept.prompts] == [3, 3]
    assert kept.texts == ("62", "63", "42", "43")
    np.testing.assert_allclose(kept.rewards, [62.03, 63.03, 42.03, 43.03], rtol=1e-6)
    assert concat([dataclasses.replace(run(), rollout_s=s) for s in (1.0, 3.0)]).rollout_s == 4.0


def test_statistics_of_a_rollout():
    scored = run()
    lengths = (1, 2, 3, 4, 5, 9)
    completions = tuple(
        dataclasses.replace(c, token_ids=np.zeros(n, np.int32), rounds=n, finish_reason="length" if n == 9 else "stop")
        for c, n in zip(scored.completions, lengths, strict=True)
    )
    status = ("ok", "error", "ok", "timeout", "error", "ok")
    scored = dataclasses.replace(scored, completions=completions, reward_status=status, rollout_s=2.0)
    out = rollout_metrics(scored)
    assert (out["rollout/tokens"], out["rollout/tokens_per_s"], out["rollout/len_mean"]) == (24, 12.0, 4.0)
    assert (out["rollout/len_p50"], out["rollout/len_p90"], out["rollout/len_max"]) == (3.5, 7.0, 9)
    assert out["rollout/truncated_frac"] == pytest.approx(1 / 6)
    assert (out["spec/accept_len"], out["reward/errors"], out["reward/timeouts"]) == (1.0, 2, 1)


def test_evaluation_counts_right_responses_and_prompts():
    """mean@k, pass@1 and pass@k; the law is not truncated, and ids are none of training's."""
    asked = []

    class Recorder(CountingEngine):
        def submit(self, requests):
            asked.extend(requests)
            super().submit(requests)

    def right(text, reference):
        return float(int(text) - EVAL_REQUEST_ID in (0, 2, 3))

    config = EvalConfig(num_samples=2, temperature=0.5, max_tokens=5)
    pool = WorkerPool([Recorder(0)])
    scored, metrics = evaluate(pool, LocalRewards(right), PROMPTS, SAMPLING, config, lambda ids: str(ids[0]))
    assert (metrics["eval/mean_at_k"], metrics["eval/pass_at_1"]) == (0.5, 0.5)
    assert metrics["eval/pass_at_k"] == pytest.approx(2 / 3) and metrics["eval/num_responses"] == 6
    assert {(r.sampling.top_p, r.sampling.temperature, r.sampling.max_tokens) for r in asked} == {(1.0, 0.5, 5)}
    assert [r.request_id - EVAL_REQUEST_ID for r in asked] == list(range(6))
    assert len(scored.completions) == 6
