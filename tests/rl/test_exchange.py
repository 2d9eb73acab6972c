"""What goes from process to process after a rollout."""

import dataclasses

import numpy as np
import pytest

from tlt_jax.rl.exchange import Share, exchange, pack, sum_over_processes, unpack
from tlt_jax.types import Completion, Request, SamplingParams

SAMPLING = SamplingParams(max_tokens=8)


def make_requests(num_prompts, group_size=2):
    return [
        Request(request_id=100 + p * group_size + r, prompt_id=p, sample=r, prompt_ids=(p + 1, 2), sampling=SAMPLING)
        for p in range(num_prompts)
        for r in range(group_size)
    ]


def make_share(requests, rows, worker):
    rng = np.random.default_rng(worker)
    completions = []
    for row in rows:
        n = row % 4  # a response may be empty
        completions.append(
            Completion(
                request_id=requests[row].request_id,
                prompt_id=7 + row,
                sample=requests[row].sample,
                prompt_ids=requests[row].prompt_ids,
                token_ids=rng.integers(0, 50_000, n).astype(np.int32),
                logprobs=rng.normal(size=n).astype(np.float32),
                finish_reason="stop",
                policy_version=3,
                worker=worker,
                rounds=np.int32(n),  # pyright: ignore[reportArgumentType]  # engines may leave numpy scalars
                start_s=0.1,
                end_s=0.1 + 1 / 3,
            )
        )
    return Share(
        rows=tuple(rows),
        completions=tuple(completions),
        texts=tuple(f"zwölf\n{row}" for row in rows),
        scores=tuple(float(np.float32(row / 3)) for row in rows),
        status=("ok",) * len(rows),
        messages=("row 1: \x00",),
        rollout_s=1.5,
    )


def assert_equal(a, b):
    assert dataclasses.replace(a, completions=()) == dataclasses.replace(b, completions=())
    for ours, theirs in zip(a.completions, b.completions, strict=True):
        for field in dataclasses.fields(Completion):
            np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name))
        assert ours.token_ids.dtype == np.int32 and ours.logprobs.dtype == np.float32


@pytest.mark.parametrize("rows", [(), (0,), (5, 2, 3, 0)])
def test_a_share_arrives_as_it_left(rows):
    """To the bit: floats, empty responses, newlines in texts; a process may have had nothing to do."""
    requests = make_requests(3)
    share = make_share(requests, rows, worker=1)
    assert_equal(unpack(pack(share), requests), share)


def test_every_process_has_all_shares(job):
    requests = make_requests(3)
    shares = [make_share(requests, (0, 1, 4, 5), 0), make_share(requests, (2, 3), 1)]
    results, _ = job(lambda group: exchange(shares[group.index], requests, group))
    for result in results:
        for ours, theirs in zip(result, shares, strict=True):
            assert_equal(ours, theirs)


def test_counts_add_up_over_processes(job):
    results, _ = job(
        lambda group: sum_over_processes({"rounds": 2.5 + group.index} | ({"tree": 1} if group.index else {}), group)
    )
    assert results == [{"rounds": 6.0, "tree": 1}] * 2
