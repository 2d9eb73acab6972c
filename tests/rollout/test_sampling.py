import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tlt_jax.models.layers import MASKED
from tlt_jax.rollout.noise import request_key
from tlt_jax.rollout.sampling import SamplingArrays, argmax, draw, warp

V = 6
_warp = jax.jit(warp, static_argnums=2)
_draw = jax.jit(draw)


def _sampling(temperature, top_k=0, top_p=1.0, min_p=0.0, request_ids=None):
    """Scalars are broadcast to the rows of `temperature`."""
    temperature = np.atleast_1d(np.asarray(temperature, np.float32))
    B = len(temperature)
    ids = range(B) if request_ids is None else request_ids

    def fill(x, dtype):
        return np.broadcast_to(np.asarray(x, dtype), B)

    return SamplingArrays(
        key=np.stack([request_key(0, i) for i in ids]),
        temperature=temperature,
        top_k=fill(top_k, np.int32),
        top_p=fill(top_p, np.float32),
        min_p=fill(min_p, np.float32),
    )


def _law(logits, **sampling):
    """Probabilities of one row."""
    temperature = sampling.pop("temperature", 1.0)
    logits = jnp.asarray(logits, jnp.float32)[None, None]
    return np.asarray(jax.nn.softmax(_warp(logits, _sampling(temperature, **sampling), True)))[0, 0]


def _reference_kept(logits, temperature, top_k, top_p, min_p):
    """Indices kept, by the definitions, one token at a time; None where rounding decides."""
    z = [x / temperature for x in logits]
    ranked = sorted(z, reverse=True)[: top_k or None]
    total = sum(np.exp(x) for x in ranked)
    kept, mass = [], 0.0
    for x in ranked:
        p = np.exp(x) / total
        floor = min_p * np.exp(ranked[0]) / total
        if abs(mass - top_p) < 1e-4 or (min_p and abs(p - floor) < 1e-4 and x != ranked[0]):
            return None
        if kept and (mass >= top_p or p < floor):
            break
        kept.append(x)
        mass += p
    return {i for i, x in enumerate(z) if x >= kept[-1] - 1e-9}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=V, max_size=V),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, V + 2),
    top_p=st.sampled_from([0.05, 0.31, 0.62, 0.87, 0.993, 1.0]),
    min_p=st.sampled_from([0.0, 0.003, 0.11, 0.6]),
)
def test_truncated_law_is_the_renormalised_kept_set(logits, temperature, top_k, top_p, min_p):
    """Integer logits tie often; a token that ties with the last one kept stays."""
    kept = _reference_kept(logits, temperature, top_k, top_p, min_p)
    if kept is None:
        return
    weight = np.asarray([np.exp(x / temperature) if i in kept else 0.0 for i, x in enumerate(logits)])
    law = _law(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(law, weight / weight.sum(), atol=1e-6)


@pytest.mark.parametrize(
    "sampling, expected",
    [
        ({"top_p": 0.7}, [0.625, 0.375, 0.0]),
        ({"top_p": 0.4}, [1.0, 0.0, 0.0]),
        ({"top_p": 1e-6}, [1.0, 0.0, 0.0]),
        ({"top_k": 2}, [0.625, 0.375, 0.0]),
        ({"top_k": 2, "top_p": 0.6}, [1.0, 0.0, 0.0]),  # 0.625 of what top-k left
        ({"top_k": 99}, [0.5, 0.3, 0.2]),
        ({"min_p": 0.5}, [0.625, 0.375, 0.0]),
        ({"min_p": 0.39}, [0.5, 0.3, 0.2]),
        ({"min_p": 0.999}, [1.0, 0.0, 0.0]),
    ],
)
def test_truncated_laws_by_hand(sampling, expected):
    """A11: top_p 0.7 of [.5, .3, .2] never draws token 2, and the law is [.625, .375]."""
    np.testing.assert_allclose(_law(np.log([0.5, 0.3, 0.2]), **sampling), expected, atol=1e-6)


def test_ties_at_the_cut_are_kept_together():
    np.testing.assert_allclose(_law([1.0, 1.0, 1.0, 0.0], top_k=2), [1 / 3, 1 / 3, 1 / 3, 0.0], atol=1e-6)
    np.testing.assert_allclose(_law([0.0] * 5, top_p=0.3), [0.2] * 5, atol=1e-6)


def test_a_row_that_cuts_nothing_is_untouched_by_neighbours_that_do():
    """The running sum of a long law reaches 1.0 in f32 long before its tail: top-p 1.0 must not cut there."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 4, (2, 1, 50_000)), jnp.float32)
    sampling = _sampling([1.0, 1.0], top_p=[1.0, 0.9])
    law = _warp(logits, sampling, True)
    np.testing.assert_array_equal(law[0], _warp(logits, sampling, False)[0])
    assert 0 < np.sum(law[1] > MASKED) < 25_000


def test_temperature_zero_and_one_in_one_batch():
    """A12: row 0 is the plain arg-max, nothing is NaN, and row 1 still follows its noise."""
    logits = jnp.asarray([[[2.0, 5.0, 1.0]], [[2.0, 5.0, 1.0]]])
    positions = np.arange(400)
    for truncate in (False, True):
        law = _warp(logits, _sampling([0.0, 1.0]), truncate)
        law_T = jnp.broadcast_to(law, (2, len(positions), 3))
        tokens, logprobs = _draw(law_T, _sampling([0.0, 1.0]), jnp.broadcast_to(positions, (2, len(positions))))
        assert set(np.asarray(tokens[0])) == {1} and set(np.asarray(tokens[1])) == {0, 1, 2}
        assert np.isfinite(logprobs).all()
        np.testing.assert_allclose(logprobs[0], jax.nn.log_softmax(logits[0, 0])[1], atol=1e-6)


def test_uniform_law_draws_every_token():
    """A13."""
    law = jnp.zeros((1, 1000, 4))
    tokens, logprobs = _draw(law, _sampling(1.0), jnp.arange(1000)[None])
    assert np.bincount(np.asarray(tokens[0]), minlength=4).min() > 180
    np.testing.assert_allclose(logprobs, -np.log(4), atol=1e-6)


@pytest.mark.parametrize(
    "logits, sampling, token, expected",
    [
        ([2.0, 0.0], {"temperature": 0.5}, 0, -0.01815),
        ([2.0, 0.0], {"temperature": 1.0}, 0, -0.12693),
        ([2.0, 0.0], {"temperature": 0.0}, 0, -0.12693),
        (np.log([0.5, 0.3, 0.2]), {"top_p": 0.7}, 0, np.log(0.625)),
        (np.log([0.5, 0.3, 0.2]), {"top_p": 0.7}, 1, np.log(0.375)),
        (np.log([0.5, 0.3, 0.2]), {"temperature": 0.0, "top_k": 2}, 0, np.log(0.625)),
    ],
)
def test_logprob_is_that_of_the_law_really_drawn_from(logits, sampling, token, expected):
    """B1, B2: at the sampling temperature, after truncation; at temperature 0, the law at temperature 1."""
    sampling = {"temperature": 1.0} | sampling
    temperature = sampling.pop("temperature")
    arrays = _sampling([temperature] * 50, **sampling)
    law = _warp(jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (50, 1, len(logits))), arrays, True)
    tokens, logprobs = _draw(law, arrays, jnp.full((50, 1), 3))
    drawn = np.asarray(tokens[:, 0]) == token
    assert drawn.any()
    np.testing.assert_allclose(np.asarray(logprobs[:, 0])[drawn], expected, atol=1e-5)


@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 3}, {"top_p": 1.0, "min_p": 0.9}, {"temperature": 0.0}, {"temperature": 1e4}]
)
def test_ids_without_a_token_are_never_drawn_and_have_no_mass(sampling):
    """D9: whatever the settings, also where the valid tokens tie."""
    sampling = {"temperature": 1.0} | sampling
    temperature = sampling.pop("temperature")
    logits = jnp.asarray([0.3, 0.2, MASKED, MASKED])
    arrays = _sampling([temperature], **sampling)
    law = jnp.broadcast_to(_warp(logits[None, None], arrays, True), (1, 3000, 4))
    tokens, logprobs = _draw(law, arrays, jnp.arange(3000)[None])
    assert set(np.asarray(tokens[0])) <= {0, 1}
    assert np.exp(jax.nn.log_softmax(law[0, 0]))[2:].sum() == 0.0
    assert np.isfinite(logprobs).all()


def test_extreme_temperatures_stay_finite():
    logits = jnp.asarray([[[80.0, 79.0, MASKED]]] * 2)
    arrays = _sampling([1e-4, 1e4])
    law = _warp(logits, arrays, False)
    tokens, logprobs = _draw(jnp.broadcast_to(law, (2, 200, 3)), arrays, jnp.broadcast_to(jnp.arange(200), (2, 200)))
    assert set(np.asarray(tokens[0])) == {0} and set(np.asarray(tokens[1])) == {0, 1}
    np.testing.assert_allclose(logprobs[0], 0.0, atol=1e-6)
    np.testing.assert_allclose(logprobs[1], -np.log(2), atol=1e-3)


def test_drawn_tokens_follow_the_truncated_law():
    """A11 by frequency: 2e5 draws, no token outside the kept set, total variation below 0.01."""
    logits = np.log([0.5, 0.3, 0.2]).astype(np.float32)
    arrays = _sampling([1.0] * 4, top_p=[0.7, 1.0, 0.7, 0.9])
    law = _warp(jnp.broadcast_to(logits, (4, 1, 3)), arrays, True)
    positions = jnp.broadcast_to(jnp.arange(50_000), (4, 50_000))
    tokens, _ = _draw(jnp.broadcast_to(law, (4, 50_000, 3)), arrays, positions)
    for row, expected in enumerate([[0.625, 0.375, 0], [0.5, 0.3, 0.2], [0.625, 0.375, 0], [0.5, 0.3, 0.2]]):
        freq = np.bincount(np.asarray(tokens[row]), minlength=3) / 50_000
        assert np.abs(freq - expected).sum() / 2 < 0.01
        assert row in (1, 3) or freq[2] == 0.0


def test_draw_does_not_depend_on_rows_beside_it():
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 2, (5, 1, 40)), jnp.float32)
    settings_ = {"top_k": [0, 3, 0, 0, 7], "top_p": [1.0, 1.0, 0.8, 1.0, 0.9], "min_p": [0, 0, 0, 0.1, 0]}
    arrays = _sampling([1.0, 0.7, 1.3, 0.0, 1.0], request_ids=[4, 8, 15, 16, 23], **settings_)
    together = _draw(_warp(logits, arrays, True), arrays, jnp.full((5, 1), 9))
    for i in range(5):
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], arrays)
        alone = _draw(_warp(logits[i : i + 1], row, True), row, jnp.full((1, 1), 9))
        assert alone[0] == together[0][i]
        np.testing.assert_allclose(alone[1][0], together[1][i], atol=1e-6)


def test_argmax_is_the_first_largest_and_survives_nan():
    rows = jnp.asarray([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, -jnp.inf], [MASKED, MASKED, -1.0]])
    assert argmax(rows).tolist() == [1, 0, 2]
    assert argmax(rows).dtype == jnp.int32
    assert 0 <= int(argmax(jnp.asarray([jnp.nan, jnp.nan]))) < 2
