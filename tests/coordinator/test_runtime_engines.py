"""Several engines behind one queue. Both live on one device here, and share their programs."""

import itertools

import pytest

from tests.rollout.tiny import check, make_engine, prompt, request, with_sampling
from tlt_jax.coordinator.runtime import WorkerPool

REQUESTS = [
    request(i, prompt(i // 2, 4 + i // 2), prompt_id=i // 2, sample=i % 2, ignore_eos=True, max_tokens=3 + 7 * i % 11)
    for i in range(12)
]


@pytest.fixture(scope="module")
def workers() -> WorkerPool:
    return WorkerPool([make_engine(worker=i, max_live=1) for i in range(2)])


def test_all_completions_come_back_in_order(workers):
    done, seen = [], []
    completions = workers.generate(REQUESTS, done.extend, seen.append)
    check(completions, REQUESTS)
    assert sorted(c.request_id for c in done) == list(range(12))
    last = seen[-1]
    num_tokens = sum(len(c.token_ids) for c in completions)
    assert (last.done, last.live, last.waiting, last.tokens) == (12, 0, 0, num_tokens)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)  # also where an engine runs dry in between


def test_one_clock_for_the_whole_rollout(workers):
    """An engine that runs dry and takes another group does not start its clock again."""
    completions = workers.generate(REQUESTS)
    for number in (0, 1):
        spans = sorted((c.start_s, c.end_s) for c in completions if c.worker == number)
        for (_, end_s), (start_s, _) in itertools.pairwise(spans):  # one row: one response after the other
            assert start_s >= end_s


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_bad_request_among_good_ones_leaves_idle_engines(num_workers):
    workers = WorkerPool([make_engine(worker=i, max_live=1) for i in range(num_workers)])
    bad = [*REQUESTS[:6], request(99, (), prompt_id=50), *REQUESTS[6:]]
    with pytest.raises(ValueError, match="request 99: got an empty prompt"):
        workers.generate(bad)
    assert not any(e.has_work for e in workers.engines)
    workers.load([e._weights for e in workers.engines])
    check(workers.generate(REQUESTS[:4]), REQUESTS[:4])


def test_a_failing_callback_stops_all_workers(workers):
    def fail(_):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        workers.generate([with_sampling(r, max_tokens=20) for r in REQUESTS], on_done=fail)
    assert not any(e.has_work for e in workers.engines)
    check(workers.generate(REQUESTS), REQUESTS)


def test_refusals(workers):
    with pytest.raises(ValueError, match="got a request id twice, expected distinct ids"):
        workers.generate([REQUESTS[0], REQUESTS[0]])
    with pytest.raises(ValueError, match="workers: got no engines, expected at least one"):
        WorkerPool([])
    with pytest.raises(ValueError, match=r"workers: got the numbers \[0, 0\], expected each engine its own"):
        WorkerPool([workers.engines[0]] * 2)
    assert workers.generate([]) == []


def test_withdrawn_requests_run_elsewhere():
    """The last that came go first; what is withdrawn may come again."""
    engine, other = (make_engine(worker=i, max_live=1) for i in range(2))
    engine.submit(REQUESTS[:4])
    assert engine.withdraw(2) == REQUESTS[2:4] and engine.withdraw(99) == REQUESTS[:2] and not engine.has_work
    engine.submit(REQUESTS[:3])
    engine.step()
    assert engine.withdraw(1) == [REQUESTS[2]]
    check(other.generate([REQUESTS[2]]), [REQUESTS[2]])
    engine.submit([REQUESTS[2]])
    done = []
    while engine.has_work:
        done += engine.step()
    check(sorted(done, key=lambda c: c.request_id), REQUESTS[:3])
