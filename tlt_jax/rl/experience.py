"""Requests out of prompts, scored responses out of requests, and what a rollout's statistics are.

Life of a batch:
  1. `make_requests`: G requests per prompt; ids count up through the run, so the noise of a response is fixed by the
     run's seed, its step and its place.
  2. The workers decode; finished responses go to the reward pool while the rest still decodes.
  3. In a job of several processes each has what its own workers completed, and gets the rest from the others.
  4. `Scored` holds everything in the order of the requests: row i is response i, whatever finished first, in every
     process.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tlt_jax.coordinator.driver import OnProgress
from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.processes import Group
from tlt_jax.rl.exchange import Share, exchange
from tlt_jax.rl.rewards import RewardItem, RewardPool, RewardResult
from tlt_jax.rl.tasks import Prompt
from tlt_jax.rollout.engine import Progress
from tlt_jax.types import FINISH_LENGTH, Completion, Request, SamplingParams

# Request ids of evaluations lie above those of training, so that evaluating changes no training response.
EVAL_REQUEST_ID = 1 << 62


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """Responses of one batch of prompts with their rewards, prompt after prompt."""

    prompts: tuple[Prompt, ...]
    completions: tuple[Completion, ...]  # len(prompts) * group_size
    texts: tuple[str, ...]
    rewards: np.ndarray  # f32[P*R]
    reward_status: tuple[str, ...]  # per response: "ok", "error" or "timeout"
    reward_messages: tuple[str, ...]
    rollout_s: float
    reward_s: float  # waited for rewards after the last response had finished

    @property
    def rewards_PR(self) -> np.ndarray:
        return self.rewards.reshape(len(self.prompts), -1)


def make_requests(
    prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams, first_request_id: int
) -> list[Request]:
    """`group_size` requests per prompt, next to each other, ids from `first_request_id` on.

    A prompt drawn twice in one batch makes two groups: the group id is the place in the batch.
    """
    return [
        Request(
            request_id=first_request_id + p * group_size + r,
            prompt_id=p,
            sample=r,
            prompt_ids=prompt.token_ids,
            sampling=sampling,
        )
        for p, prompt in enumerate(prompts)
        for r in range(group_size)
    ]


def collect(
    workers: WorkerPool,
    rewards: RewardPool,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    decode_text: Callable[[Sequence[int]], str],
    on_progress: OnProgress | None = None,
    *,
    step: int = 0,
    train: bool = False,
    expected_lens: Mapping[int, float] | None = None,
    group: Group | None = None,
) -> Scored:
    """Decodes and scores `requests`; rewards are computed while the tail decodes.

    In a job of several processes all call this with the same prompts and requests, and all get the same responses.

    Args:
      workers: engines with weights loaded.
      rewards: the pool that scores.
      prompts: in the order of the groups of `requests`.
      requests: from `make_requests` over `prompts`.
      decode_text: token ids to text.
      on_progress: called as responses advance.
      step: RL step.
      train: whether idle workers train the drafter.
      expected_lens: tokens of a response by place in `prompts`, where known.
      group: the processes of the job; default: this one alone.
    """
    group = group or Group()
    first_id = requests[0].request_id
    texts: dict[int, str] = {}
    pending: list[tuple[list[int], concurrent.futures.Future[RewardResult]]] = []

    def on_done(done: list[Completion]) -> None:
        rows = [c.request_id - first_id for c in done]
        texts.update({row: decode_text(c.token_ids.tolist()) for row, c in zip(rows, done, strict=True)})
        items = [
            RewardItem(
                row_id=row, text=texts[row], finish_reason=c.finish_reason, reference=prompts[c.prompt_id].reference
            )
            for row, c in zip(rows, done, strict=True)
        ]
        pending.append((rows, rewards.submit(items)))

    def on_step(progress: Progress) -> None:
        group.advance()
        if on_progress is not None:
            on_progress(progress)

    start_s = time.perf_counter()
    completions = workers.generate(requests, on_done, on_step, step=step, train=train, expected_lens=expected_lens)
    rollout_s = time.perf_counter() - start_s
    scores, messages = _wait_for_scores(pending)
    rows = [c.request_id - first_id for c in completions]
    share = Share(
        rows=tuple(rows),
        completions=tuple(dataclasses.replace(c, prompt_id=prompts[c.prompt_id].prompt_id) for c in completions),
        texts=tuple(texts[row] for row in rows),
        scores=tuple(scores[row][0] for row in rows),
        status=tuple(scores[row][1] for row in rows),
        messages=tuple(messages),
        rollout_s=rollout_s,
    )
    return _merge(exchange(share, requests, group), prompts, start_s)


def _wait_for_scores(
    pending: Sequence[tuple[list[int], concurrent.futures.Future[RewardResult]]],
) -> tuple[dict[int, tuple[float, str]], list[str]]:
    """Score and status by row, and what went wrong."""
    scores: dict[int, tuple[float, str]] = {}
    messages: list[str] = []
    for rows, future in pending:
        result = future.result()
        messages += result.messages
        for row, score, status in zip(rows, result.scores, result.status, strict=True):
            scores[row] = (float(score), status)
    return scores, messages


def _merge(shares: Sequence[Share], prompts: Sequence[Prompt], start_s: float) -> Scored:
    """The whole batch in order, now that all shares are here."""
    total_s = time.perf_counter() - start_s
    place = {row: (share, i) for share in shares for i, row in enumerate(share.rows)}
    num_rows = sum(len(share.rows) for share in shares)
    assert sorted(place) == list(range(num_rows)), "a response is missing, or was generated twice"
    parts = [place[row] for row in range(num_rows)]
    rollout_s = min(max(share.rollout_s for share in shares), total_s)
    return Scored(
        prompts=tuple(prompts),
        completions=tuple(share.completions[i] for share, i in parts),
        texts=tuple(share.texts[i] for share, i in parts),
        rewards=np.array([share.scores[i] for share, i in parts], np.float32),
        reward_status=tuple(share.status[i] for share, i in parts),
        reward_messages=tuple(message for share in shares for message in share.messages),
        rollout_s=rollout_s,
        reward_s=total_s - rollout_s,
    )


def concat(parts: Sequence[Scored]) -> Scored:
    """Several batches as one, in order."""
    rollout_s = sum(part.rollout_s for part in parts)
    return Scored(
        prompts=tuple(p for part in parts for p in part.prompts),
        completions=tuple(c for part in parts for c in part.completions),
        texts=tuple(t for part in parts for t in part.texts),
        rewards=np.concatenate([part.rewards for part in parts]),
        reward_status=tuple(s for part in parts for s in part.reward_status),
        reward_messages=tuple(m for part in parts for m in part.reward_messages),
        rollout_s=rollout_s,
        reward_s=sum(part.reward_s for part in parts),
    )


def take_groups(scored: Scored, groups: Sequence[int]) -> Scored:
    """The given prompts' groups only, in the given order."""
    size = len(scored.completions) // len(scored.prompts)
    rows = [g * size + r for g in groups for r in range(size)]
    return dataclasses.replace(
        scored,
        prompts=tuple(scored.prompts[g] for g in groups),
        completions=tuple(scored.completions[i] for i in rows),
        texts=tuple(scored.texts[i] for i in rows),
        rewards=scored.rewards[rows],
        reward_status=tuple(scored.reward_status[i] for i in rows),
    )


def rollout_metrics(scored: Scored) -> dict[str, float]:
    """Lengths in tokens, throughput, rewards and their failures, named as in metrics.jsonl."""
    lengths = np.asarray([len(c.token_ids) for c in scored.completions])
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    num_rounds = sum(c.rounds for c in scored.completions)
    truncated = [c.finish_reason == FINISH_LENGTH for c in scored.completions]
    return {
        "time/rollout_s": scored.rollout_s,
        "time/reward_s": scored.reward_s,
        "rollout/tokens": int(lengths.sum()),
        "rollout/tokens_per_s": float(lengths.sum() / max(scored.rollout_s, 1e-9)),
        "rollout/len_mean": float(lengths.mean()),
        "rollout/len_p50": float(p50),
        "rollout/len_p90": float(p90),
        "rollout/len_p99": float(p99),
        "rollout/len_max": int(lengths.max()),
        "rollout/truncated_frac": float(np.mean(truncated)),
        "spec/accept_len": float(lengths.sum() / max(num_rounds, 1)),
        "spec/accept_len_straggler": max(scored.completions, key=lambda c: c.end_s).accept_len,
        "spec/drafted": sum(c.drafted for c in scored.completions),
        "spec/accepted": sum(c.accepted for c in scored.completions),
        "rl/reward_mean": float(scored.rewards.mean()),
        "reward/errors": scored.reward_status.count("error"),
        "reward/timeouts": scored.reward_status.count("timeout"),
    }
