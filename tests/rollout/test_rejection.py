"""The rules that keep the law but not the tokens: by enumeration on three tokens, and through the engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout import drafters, tiny
from tlt_jax.rollout import rejection, tree as trees
from tlt_jax.rollout.noise import gumbel, request_key
from tlt_jax.rollout.sampling import SamplingArrays, draw

N = 200_000
P = np.asarray([0.5, 0.3, 0.2])
AFTER = np.asarray([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]])  # target's second token given the first
Q = np.asarray([[0.6, 0.3, 0.1], [0.3, 0.6, 0.1], [0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])  # drafter: first, then given it
EXACT = P[:, None] * AFTER


def sampling(temperature=1.0) -> SamplingArrays:
    rng = np.random.default_rng(0)
    return SamplingArrays(
        key=rng.integers(0, 2**32, (N, 2), dtype=np.uint32),
        temperature=np.full(N, temperature, np.float32),
        top_k=np.zeros(N, np.int32),
        top_p=np.ones(N, np.float32),
        min_p=np.zeros(N, np.float32),
    )


START = np.zeros(N, np.int32)
POSITION = np.broadcast_to(np.arange(1, 4, dtype=np.int32), (N, 3))


def law_after(tokens_BD) -> jnp.ndarray:
    """Log-probabilities at the root and after each of two drafts; what follows the second never counts."""
    first = jnp.broadcast_to(jnp.log(P), (N, 3))
    second = jnp.log(AFTER)[tokens_BD[:, 0]]
    return jnp.stack([first, second, second], axis=1).astype(jnp.float32)


def pair_law(tokens_BW, num_B, spare: SamplingArrays) -> np.ndarray:
    """The law of the first two tokens; a row that committed one gets its second from plain decoding."""
    second, _ = draw(jnp.log(AFTER)[tokens_BW[:, 0]][:, None].astype(jnp.float32), spare, np.full((N, 1), 9))
    second = np.where(np.asarray(num_B) > 1, np.asarray(tokens_BW[:, 1]), np.asarray(second[:, 0]))
    return np.histogram2d(np.asarray(tokens_BW[:, 0]), second, bins=[range(4)] * 2)[0] / N


def total_variation(a, b) -> float:
    return 0.5 * float(np.abs(a - b).sum())


def drafted(s: SamplingArrays, kind: str):
    """A chain of two and the law it is said to be drawn from."""
    if kind == "certain":  # n-grams: nobody drew them
        drafts = np.tile(np.asarray([[0, 2]], np.int32), (N, 1))
        return drafts, None
    position = POSITION[:, :2]
    noise = gumbel(jnp.broadcast_to(s.key[:, None], (N, 2, 2)), position, 3, rejection.stream(1, position, START))
    first = jnp.argmax(jnp.log(Q[0]) + noise[:, 0], axis=1)
    log_q = jnp.stack([jnp.broadcast_to(jnp.log(Q[0]), (N, 3)), jnp.log(Q[1:])[first]], axis=1)
    second = jnp.argmax(log_q[:, 1] + noise[:, 1], axis=1)
    return np.stack([first, second], axis=1).astype(np.int32), log_q.astype(jnp.float32)


@pytest.mark.parametrize("kind", ["drawn", "certain"])
def test_rejection_keeps_the_law(kind):
    """A8, A9, A10, A35: total variation of two tokens under 0.01, with drafts drawn from q and with certain ones."""
    s = sampling()
    drafts, log_q = drafted(s, kind)
    tree = dataclasses.replace(trees.chain(START, jnp.asarray(drafts), np.full(N, 2)), log_q=log_q)
    law = law_after(drafts)
    verdict = rejection.accept(tree, law, s, POSITION, START)
    spare = dataclasses.replace(s, key=s.key[::-1])
    assert total_variation(pair_law(verdict.tokens, verdict.num_committed, spare), EXACT) < 0.01
    first_accept = float(np.mean(np.asarray(verdict.num_committed) > 1))
    expected = P[0] if kind == "certain" else np.minimum(P, Q[0]).sum()
    assert abs(first_accept - expected) < 0.01
    # A8: the log-probs are those of a plain forward, rejections included.
    right = jnp.take_along_axis(jax.nn.log_softmax(law, axis=-1), verdict.tokens[..., None], axis=2)[..., 0]
    np.testing.assert_array_equal(verdict.logprobs, right)


def test_target_only_keeps_the_law():
    """A deterministic tree (the drafter's two likeliest first tokens, one child each) and the target's own draws."""
    s = sampling()
    tokens = jnp.tile(jnp.asarray([[0, 0, 1, 2, 1]], jnp.int32), (N, 1))
    tree = trees.Tree(
        tokens=tokens,
        parent=jnp.tile(jnp.asarray([[0, 0, 0, 1, 2]], jnp.int32), (N, 1)),
        depth=jnp.tile(jnp.asarray([[0, 1, 1, 2, 2]], jnp.int32), (N, 1)),
        valid=jnp.ones((N, 5), bool),
    )
    law = jnp.log(jnp.asarray(np.stack([P, AFTER[0], AFTER[1], P, P]), jnp.float32))
    drawn, logprobs = draw(jnp.broadcast_to(law, (N, 5, 3)), s, 1 + tree.depth)
    verdict = trees.accept(tree, drawn, logprobs)
    spare = dataclasses.replace(s, key=s.key[::-1])
    assert total_variation(pair_law(verdict.tokens, verdict.num_committed, spare), EXACT) < 0.01
    assert abs(float(np.mean(np.asarray(verdict.num_committed) > 1)) - 0.8) < 0.01


def test_no_bits_are_used_twice():
    """A35: kinds, positions and rounds have streams of their own, none of them the tokens' stream 0."""
    streams = set()
    for kind in (rejection.DRAFT, rejection.TEST, rejection.RESIDUAL, rejection.BONUS):
        for start in range(50):
            position = np.arange(start + 1, start + 9)[None]
            numbers = np.asarray(rejection.stream(kind, position, np.asarray([start])))[0]
            streams |= {(int(t), int(n)) for t, n in zip(position[0], numbers, strict=True)}
    assert len(streams) == 4 * 50 * 8 and not any(n == 0 for _, n in streams)
    key = jnp.asarray(request_key(1, 2))
    draws = [np.asarray(gumbel(key, jnp.int32(5), 8, jnp.uint32(n))) for n in (0, 1, 9)]
    np.testing.assert_array_equal(draws[0], gumbel(key, jnp.int32(5), 8))
    assert not np.allclose(draws[0], draws[1]) and not np.allclose(draws[1], draws[2])


def test_greedy_rejection_is_greedy_decoding():
    """A12: temperature 0 next to 1 in one batch: greedy rows are plain decoding's, hot ones are sane."""
    asked = [
        tiny.request(i, tiny.prompt(i, 9), prompt_id=i, max_tokens=16, temperature=float(i % 2), ignore_eos=True)
        for i in range(4)
    ]
    right = tiny.make_engine().generate(asked)
    parts = {"drafter": drafters.eagle_model(), "bandit": drafters.playing("chain_3", "ngram_3", max_rounds=2)}
    engine = tiny.make_engine(parts=parts, fresh_pool=True, verify="rejection", min_kv=128)
    engine.load_drafter(drafters.eagle_weights())
    got = engine.generate(asked)
    assert [c.token_ids.tolist() for c in got[::2]] == [c.token_ids.tolist() for c in right[::2]]
    logits = tiny.full_logits([[*c.prompt_ids, *c.token_ids] for c in got])
    for i, c in enumerate(got):
        assert len(c.token_ids) == 16 and np.isfinite(c.logprobs).all()
        for j, token in enumerate(c.token_ids):
            law = tiny.law(logits[i, len(c.prompt_ids) + j - 1], asked[i].sampling)
            np.testing.assert_allclose(c.logprobs[j], law[token], atol=1e-4)


def test_trees_need_another_rule():
    parts = {"drafter": drafters.eagle_model(), "bandit": drafters.playing("2_2_4")}
    with pytest.raises(ValueError, match=r"rollout\.verify: got .rejection. with the trees 2_2_4, expected chains"):
        tiny.make_engine(parts=parts, verify="rejection")
