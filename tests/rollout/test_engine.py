"""The engine against an oracle: a forward without a cache and the request's noise decide every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout import tiny
from tests.rollout.tiny import check, make_engine, prompt, request, tiny_params, tokens_of, with_sampling
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.sharding import param_shardings, publish
from tlt_jax.types import Request, SamplingParams

MIXED = [
    request(0, prompt(0, 1), temperature=0.0),
    request(1, prompt(1, 7), temperature=1.0),
    request(2, prompt(2, 17), temperature=0.6, top_k=5),
    request(3, prompt(2, 17), temperature=1.0, top_p=0.8, sample=1),
    request(4, prompt(4, 33), temperature=1.3, min_p=0.05, max_tokens=20),
    request(5, prompt(5, 2), temperature=0.0, top_k=3, max_tokens=1),
    request(2**40, prompt(6, 16), temperature=1.0, stop_token_ids=(10, 20, 30, 40, 50)),
    request(7, prompt(7, 40), temperature=1.0, ignore_eos=True, max_tokens=24),
]


def chars(token_ids) -> str:
    """Two letters per token, so that stop strings can begin and end inside a token."""
    return "".join(f"{chr(97 + t % 7)}{chr(97 + t % 5)}" for t in token_ids)


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine()


def _naive(r: Request) -> tuple[list[int], list[float]]:
    """One full forward per token."""
    s, ids, logprobs = r.sampling, list(r.prompt_ids), []
    noise = tiny.position_noise([r.request_id])[0]
    stop_ids = {*s.stop_token_ids, *(() if s.ignore_eos else tiny.MODEL.eos_token_ids)}
    while len(logprobs) < s.max_tokens:
        logits = tiny.full_logits([ids])[0, len(ids) - 1]
        token = int(np.argmax(tiny.choose(logits, noise[len(ids)], s)))
        ids.append(token)
        logprobs.append(tiny.law(logits, s)[token])
        if token in stop_ids:
            break
    return ids[len(r.prompt_ids) :], logprobs


def test_tokens_and_logprobs_are_those_of_a_naive_loop(engine):
    for c, r in zip(engine.generate(MIXED), MIXED, strict=True):
        tokens, logprobs = _naive(r)
        assert c.token_ids.tolist() == tokens
        np.testing.assert_allclose(c.logprobs, logprobs, atol=1e-4)


def test_every_completion_passes_the_oracle(engine):
    """A5, A6: log-probs of every emitted token against a teacher-forced forward, one per token."""
    requests = [with_sampling(r, max_tokens=8) for r in MIXED]
    requests += [request(100 + i, prompt(i % 5, 5 + i), prompt_id=i % 5, sample=i // 5) for i in range(20)]
    completions = engine.generate(requests)
    check(completions, requests)
    assert {c.token_ids.dtype.name for c in completions} == {"int32"}
    assert {c.logprobs.dtype.name for c in completions} == {"float32"}
    assert all(0 <= c.start_s <= c.end_s for c in completions)


def test_engine_draws_from_the_softmax_of_its_model(engine):
    """A4: frequency of each first token, stop ids among them, within 4 sigma of the law."""
    ids = prompt(3, 9)
    requests = [request(i, ids, temperature=0.8, max_tokens=1) for i in range(800)]
    first = np.asarray([c.token_ids[0] for c in engine.generate(requests)])
    p = np.exp(tiny.law(tiny.full_logits([list(ids)])[0, len(ids) - 1], requests[0].sampling))
    for token in range(tiny.VOCAB):
        sigma = np.sqrt(p[token] * (1 - p[token]) / len(first))
        assert abs(np.mean(first == token) - p[token]) < 4 * sigma + 1e-3


def test_all_stop_ids_of_the_model_end_a_response(engine):
    """B12: with ids [2, 3], an answer that ends with either is finished, not truncated."""
    requests = [request(i, prompt(i, 6), temperature=1.5, max_tokens=30) for i in range(40)]
    completions = engine.generate(requests)
    last = {int(c.token_ids[-1]) for c in completions if c.finish_reason == "stop"}
    assert last == {2, 3}
    free = engine.generate([with_sampling(r, ignore_eos=True) for r in requests])
    for a, b in zip(completions, free, strict=True):
        assert (len(b.token_ids), b.finish_reason) == (30, "length")
        np.testing.assert_array_equal(a.token_ids, b.token_ids[: len(a.token_ids)])


def test_a_truncated_answer_keeps_its_sampled_tokens(engine):
    """B13."""
    r = request(7, prompt(7, 12), ignore_eos=True, max_tokens=24)
    whole = engine.generate([r])[0]
    for cap in (1, 4, 5, 23):
        cut = engine.generate([with_sampling(r, max_tokens=cap)])[0]
        assert (cut.finish_reason, len(cut.token_ids), len(cut.logprobs)) == ("length", cap, cap)
        np.testing.assert_array_equal(cut.token_ids, whole.token_ids[:cap])


def test_a_stop_id_cuts_the_answer_there(engine):
    """A1, A2: the same answer up to the first stop id, which is kept; at the cap a stop is a stop."""
    r = request(1, prompt(9, 8), temperature=0.0, ignore_eos=True, max_tokens=12)
    whole = engine.generate([r])[0].token_ids.tolist()
    for stop_at in (0, 3, 7):
        first = whole.index(whole[stop_at])
        for cap in (first + 1, first + 2, 12):
            c = engine.generate([with_sampling(r, stop_token_ids=(whole[stop_at], 95), max_tokens=cap)])[0]
            assert (c.token_ids.tolist(), c.finish_reason) == (whole[: first + 1], "stop")
        if first:
            c = engine.generate([with_sampling(r, stop_token_ids=(whole[stop_at],), max_tokens=first)])[0]
            assert (c.token_ids.tolist(), c.finish_reason) == (whole[:first], "length")


def test_the_last_slot_of_the_cache():
    """A19: prompt and answer fill `max_len` to the last token."""
    engine = make_engine(max_len=64, max_live=1)
    assert engine.config.kv_buckets == (64,)
    requests = [request(i, prompt(i, 64 - n), ignore_eos=True, max_tokens=n) for i, n in enumerate((1, 2, 12, 40, 63))]
    check(engine.generate(requests), requests)


def test_a_growing_cache():
    """H4: rows that outgrow their bucket go on in the next one."""
    engine = make_engine(max_live=2, max_len=128)
    requests = [request(i, prompt(i, n), ignore_eos=True, max_tokens=100) for i, n in enumerate((3, 28))]
    check(engine.generate(requests), requests)
    assert engine.stats.resizes >= 1
    long_prompt = [request(9, prompt(9, 100), max_tokens=10, ignore_eos=True)]
    check(engine.generate(long_prompt), long_prompt)


def test_ragged_rows_and_rows_that_leave(engine):
    """A28, A29: prompts of 1 and 7 tokens together as alone; a row that ends leaves the others as they were."""
    requests = [
        request(i, prompt(i, n), ignore_eos=True, max_tokens=m) for i, n, m in ((0, 1, 14), (1, 7, 3), (2, 7, 14))
    ]
    together = tokens_of(engine.generate(requests))
    for r in requests:
        assert tokens_of(engine.generate([r])) == {r.request_id: together[r.request_id]}


def test_a_prompt_is_prefilled_once_for_all_its_samples(engine):
    """Siblings share the prefill of all but the prompt's last token, also those that wait; other prompts do not."""
    before = engine.stats.prefill_tokens
    requests = [request(i, prompt(i // 9, 11 + i // 9), sample=i % 9, max_tokens=5) for i in range(18)]
    check(engine.generate(requests), requests)
    assert engine.stats.prefill_tokens - before == 10 + 11
    engine.generate([request(0, (5,), max_tokens=2)])  # nothing to prefill
    assert engine.stats.prefill_tokens - before == 10 + 11


def test_runs_repeat(engine):
    """B24: nothing drifts with the engine's age."""
    first = engine.generate(MIXED)
    for _ in range(3):
        for a, b in zip(first, engine.generate(MIXED), strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_another_seed_is_another_rollout_and_greedy_has_none(engine):
    other = make_engine(seed=tiny.SEED + 1)
    a, b = tokens_of(engine.generate(MIXED)), tokens_of(other.generate(MIXED))
    assert a[0] == b[0] and a[5] == b[5]
    assert a[7] != b[7] and a[1] != b[1]


def test_weights_are_a_copy_and_completions_carry_their_version(engine):
    """C13, and the donation trap: an update that donates the learner's weights leaves the engine's alone."""
    learner = jax.tree.map(jnp.copy, tiny_params())
    mesh_engine = make_engine()
    shardings = param_shardings(learner, mesh_engine.mesh, heads=tiny.MODEL.num_kv_heads)
    mesh_engine.load(publish(learner, shardings, 41))
    learner = jax.jit(lambda p: jax.tree.map(lambda x: x * 0.9, p), donate_argnums=0)(learner)
    before = mesh_engine.generate(MIXED)
    assert tokens_of(before) == tokens_of(engine.generate(MIXED))
    mesh_engine.load(publish(learner, shardings, 42))
    after = mesh_engine.generate(MIXED)
    assert [c.policy_version for c in before + after] == [41] * 8 + [42] * 8
    r = MIXED[0]
    greedy = [int(np.argmax(x)) for x in tiny.full_logits([[*r.prompt_ids, *after[0].token_ids]], learner)[0]]
    assert after[0].token_ids.tolist() == greedy[: len(after[0].token_ids)]
    assert tokens_of(after) != tokens_of(before)


def test_stop_strings():
    """Cut after the token that completes a string, wherever dispatches and tokens begin and end; also at the cap."""
    engine = make_engine(decode_text=chars)
    r = request(1, prompt(9, 8), ignore_eos=True, max_tokens=20)
    whole = engine.generate([r])[0].token_ids.tolist()
    text = chars(whole)
    for begin in (0, 3, 6, 13, 30):
        for width in (1, 2, 5, 9):
            stop = text[begin : begin + width]
            num_tokens = (text.index(stop) + len(stop) + 1) // 2
            c = engine.generate([with_sampling(r, stop=("zz", stop))])[0]
            assert (c.token_ids.tolist(), c.finish_reason) == (whole[:num_tokens], "stop")
            c = engine.generate([with_sampling(r, stop=(stop,), max_tokens=num_tokens)])[0]
            assert (len(c.token_ids), len(c.logprobs), c.finish_reason) == (num_tokens, num_tokens, "stop")
    several = [with_sampling(x, stop=("ab", "cd")) for x in MIXED]
    check(engine.generate(several), several, decode_text=chars)


def test_progress_and_counts(engine):
    seen = []
    before = engine.stats.tokens, engine.stats.row_rounds
    completions = engine.generate(MIXED, on_progress=seen.append)
    num_tokens = sum(len(c.token_ids) for c in completions)
    assert (seen[-1].done, seen[-1].live, seen[-1].waiting, seen[-1].tokens) == (8, 0, 0, num_tokens)
    assert seen[0].live + seen[0].waiting == 8 and seen[0].live == 4
    assert engine.stats.tokens - before[0] == num_tokens <= engine.stats.row_rounds - before[1]
    assert all(c.rounds == len(c.token_ids) and c.accept_len == 1.0 for c in completions)


def test_an_idle_engine_holds_no_cache(engine):
    engine.generate(MIXED)
    assert not engine.has_work
    assert engine._device.memory is None and not engine._device.prefixes


@pytest.mark.parametrize(
    "bad, message",
    [
        (request(1, ()), "request 1: got an empty prompt, expected at least one token"),
        (request(2, (4, 96)), r"request 2: got token ids 4..96, expected ids in \[0, 96\); tokenize with this model's"),
        (request(3, (-1, 4)), r"request 3: got token ids -1..4, expected ids in \[0, 96\)"),
        (
            request(4, prompt(0, 90), max_tokens=7),
            "request 4: got 90 prompt tokens and max_tokens 7, expected at most 96 in all; raise rollout.max_len",
        ),
        (request(5, (4,), stop_token_ids=tuple(range(10, 17))), "request 5: got 9 stop ids, expected at most 8"),
        (request(6, (4,), stop=("x",)), r"request 6: got stop strings \('x',\), expected non-empty strings and an eng"),
        (request(0, (4,)), "got a request id twice, expected distinct ids"),
    ],
)
def test_a_bad_request_is_refused_and_nothing_is_queued(engine, bad, message):
    with pytest.raises(ValueError, match=message):
        engine.submit([request(0, (4, 5)), bad])
    assert not engine.has_work and engine.step() == []
    r = [request(0, (4, 5))]
    check(engine.generate(r), r)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": -0.1}, r"sampling.temperature: got -0.1, expected 0 or in \[1e-4, 1e4\]"),
        ({"temperature": float("nan")}, "sampling.temperature: got nan"),
        ({"temperature": float("inf")}, "sampling.temperature: got inf"),
        ({"temperature": 1e-30}, "sampling.temperature: got 1e-30"),
        ({"top_k": -1}, r"sampling.top_k: got -1, expected >= 0 \(0 keeps all\)"),
        ({"top_p": 0.0}, r"sampling.top_p: got 0.0, expected in \(0, 1\]"),
        ({"top_p": 1.1}, "sampling.top_p: got 1.1"),
        ({"min_p": 1.0}, r"sampling.min_p: got 1.0, expected in \[0, 1\)"),
        ({"max_tokens": 0}, "sampling.max_tokens: got 0, expected >= 1"),
    ],
)
def test_bad_sampling_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_bad_ids_and_seeds_are_refused():
    with pytest.raises(ValueError, match=r"request_id: got -1, expected 0 <= id < 2\^64"):
        request(-1, (4,))
    with pytest.raises(ValueError, match="noise: got seed -3"):
        make_engine(seed=-3)
    assert request(1, [4, 5]).prompt_ids == (4, 5)
    one = SamplingParams(stop="ab", stop_token_ids=[7])
    assert (one.stop, one.stop_token_ids) == (("ab",), (7,))


def test_an_engine_without_weights_says_so():
    fresh = RolloutEngine(tiny.MODEL, make_engine().config)
    with pytest.raises(ValueError, match=r"engine: got no weights, expected load\(...\) before the first request"):
        fresh.generate([request(0, (4,))])
    assert not fresh.has_work


def test_a_busy_engine_refuses_weights_and_generate():
    engine = make_engine()
    engine.submit([request(0, (4, 5), ignore_eos=True)])
    engine.step()
    with pytest.raises(ValueError, match="got new weights with requests in progress, expected an idle engine"):
        engine.load(engine._weights)
    with pytest.raises(ValueError, match="got requests while others are in progress"):
        engine.generate([request(1, (4, 5))])
    with pytest.raises(ValueError, match="got a request id twice"):
        engine.submit([request(0, (4, 5))])
    done = []
    while engine.has_work:
        done += engine.step()
    check(done, [request(0, (4, 5), ignore_eos=True)])
    engine.load(engine._weights)


def test_an_engine_is_usable_after_a_failure_inside_a_step():
    calls = []

    def decode_text(token_ids):
        calls.append(len(token_ids))
        if len(calls) == 3:
            raise RuntimeError("tokenizer broke")
        return chars(token_ids)

    engine = make_engine(decode_text=decode_text)
    requests = [with_sampling(r, stop=("zz",)) for r in MIXED]
    with pytest.raises(RuntimeError, match="tokenizer broke"):
        engine.generate(requests)
    assert not engine.has_work
    engine.load(engine._weights)
    check(engine.generate(requests), requests, decode_text=chars)


def test_abort_drops_everything_in_progress(engine):
    engine.submit(MIXED)
    engine.step()
    engine.abort()
    assert not engine.has_work and engine.step() == []
    check(engine.generate(MIXED), MIXED)
