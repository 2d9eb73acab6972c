"""Same tokens for a request whatever the schedule, and any schedule passes the oracle."""

import jax
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.rollout.tiny import check, make_engine, prompt, request, tokens_of
from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.sharding import worker_meshes

REQUESTS = [
    request(i, prompt(i // 2, 3 + 6 * (i // 2)), prompt_id=i // 2, sample=i % 2, max_tokens=3 + 2 * (5 * i % 9), **s)
    for i, s in enumerate(
        [
            {"temperature": 0.0},
            {"temperature": 1.0, "ignore_eos": True},
            {"temperature": 0.7, "top_k": 8, "ignore_eos": True},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 1.2, "min_p": 0.02, "ignore_eos": True},
            {"temperature": 0.0, "ignore_eos": True},
            {"temperature": 1.0, "ignore_eos": True},
            {"temperature": 0.9},
            {"temperature": 1.0, "ignore_eos": True},
            {"temperature": 0.5, "ignore_eos": True},
        ]
    )
]


PLAIN = [r for r in REQUESTS if not r.sampling.truncates]  # half the programs to compile


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    completions = make_engine().generate(REQUESTS)
    check(completions, REQUESTS)
    return tokens_of(completions)


@pytest.fixture(scope="module")
def fuzzed_engine():
    return make_engine()


@pytest.mark.parametrize(
    "fields",
    [
        {"max_live": 1},
        {"max_live": 2},
        {"max_live": 3},
        {"refill_frac": 0.0},
        {"refill_frac": 1.0},
        {"prefill_rows": 1},
        {"prefill_chunk": 48, "max_live": 1},  # does not divide the bucket of 64
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_settings(expected, fields):
    """H4 too: chunks that do not divide a bucket, and other buckets, change nothing."""
    assert tokens_of(make_engine(**fields).generate(REQUESTS)) == expected


def _plain(expected):
    return {r.request_id: expected[r.request_id] for r in PLAIN}


@pytest.mark.parametrize("fields", [{"rounds_per_dispatch": 1}, {"max_len": 200, "min_kv": 128}], ids=str)
def test_tokens_do_not_depend_on_rounds_or_buckets(expected, fields):
    assert tokens_of(make_engine(max_live=1, **fields).generate(PLAIN)) == _plain(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"max_live": 8},
        {"max_live": 16, "prefill_rows": 8, "prefill_chunk": 33},
        {"rounds_per_dispatch": 3},
        {"rounds_per_dispatch": 40},
        {"kv_growth": 1.3, "max_len": 500},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_more_settings(expected, fields):
    assert tokens_of(make_engine(**fields).generate(REQUESTS)) == expected


def test_tokens_do_not_depend_on_order_or_neighbours(expected):
    engine = make_engine()
    assert tokens_of(engine.generate(REQUESTS[::-1])) == expected
    assert tokens_of(engine.generate(REQUESTS[5:] + REQUESTS[:5])) == expected
    some = [r for r in REQUESTS if r.request_id % 3 == 0]
    assert tokens_of(engine.generate(some)) == {r.request_id: expected[r.request_id] for r in some}


@pytest.mark.parametrize(
    "num_devices", [1, 2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_tokens_do_not_depend_on_the_devices(expected, num_devices):
    """One device other than the first, and tensor-parallel sub-meshes, with kv heads that divide and that do not."""
    devices = jax.devices()[8 - num_devices :]
    engine = make_engine(mesh=worker_meshes(devices, 1)[0], max_live=1)
    assert {d for x in jax.tree.leaves(engine._weights.params) for d in x.devices()} == set(devices)
    assert tokens_of(engine.generate(PLAIN)) == _plain(expected)


def test_tokens_do_not_depend_on_the_number_of_workers(expected):
    meshes = worker_meshes(jax.devices()[::-7], 2)  # the last device, and the first
    pool = WorkerPool([make_engine(mesh=m, worker=i, max_live=1) for i, m in enumerate(meshes)])
    completions = pool.generate(PLAIN)
    assert [c.request_id for c in completions] == [r.request_id for r in PLAIN]
    assert tokens_of(completions) == _plain(expected)
    assert {c.worker for c in completions} == {0, 1}


_SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 0, 1, 4, 200]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.35]),
        "min_p": st.sampled_from([0.0, 0.0, 0.07]),
        "max_tokens": st.integers(1, 20),
        "stop_token_ids": st.sets(st.integers(4, 89), max_size=6).map(tuple),
        "ignore_eos": st.booleans(),
    }
)
_LINE = st.tuples(st.integers(0, 2**63), st.integers(0, 3), st.sampled_from([1, 2, 15, 16, 17, 18, 33, 44]), _SAMPLING)


def _run_in_pieces(engine, lines, cuts):
    """Submits slices of the requests, with as many steps between them as `cuts` says; checks what comes back.

    Returns:
      How many requests there were, and the ids of those that came back.
    """
    requests = [
        request(i, prompt(p, length), prompt_id=p, **sampling)
        for i, (p, length, sampling) in {line[0]: line[1:] for line in lines}.items()
    ]
    size = -(-len(requests) // (len(cuts) + 1))
    done = []
    for i, num_steps in enumerate([*cuts, None]):
        engine.submit(requests[i * size : (i + 1) * size])
        while engine.has_work and num_steps != 0:
            done += engine.step()
            num_steps = None if num_steps is None else num_steps - 1
    assert not engine.has_work
    by_id = {c.request_id: c for c in done}
    check([by_id[r.request_id] for r in requests], requests)
    return len(requests), [c.request_id for c in done]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(_LINE, min_size=1, max_size=10), cuts=st.lists(st.integers(0, 3), max_size=3))
def test_any_schedule_of_any_requests(fuzzed_engine, lines, cuts):
    num, done = _run_in_pieces(fuzzed_engine, lines, cuts)
    assert len(done) == len(set(done)) == num


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lines=st.lists(_LINE, min_size=1, max_size=24),
    cuts=st.lists(st.integers(0, 4), max_size=5),
    fields=st.fixed_dictionaries(
        {
            "max_live": st.sampled_from([1, 2, 4, 7]),
            "refill_frac": st.sampled_from([0.0, 0.3, 1.0]),
            "prefill_chunk": st.sampled_from([16, 48, 64]),
            "prefill_rows": st.sampled_from([1, 2]),
            "min_kv": st.sampled_from([64, 128]),
        }
    ),
)
def test_any_schedule_with_any_settings(lines, cuts, fields):
    num, done = _run_in_pieces(make_engine(max_len=128, **fields), lines, cuts)
    assert len(done) == len(set(done)) == num
