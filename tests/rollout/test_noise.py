import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.rollout import noise
from tlt_jax.rollout.noise import gumbel, request_key, threefry2x32

ONES = (0xFFFFFFFF, 0xFFFFFFFF)
PI_COUNTER, PI_KEY = (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344)


@functools.partial(jax.jit, static_argnums=2)
def _gumbel(key_R2, position_T, vocab_size):
    key_RT2 = jnp.broadcast_to(key_R2[:, None], (len(key_R2), len(position_T), 2))
    return gumbel(key_RT2, jnp.broadcast_to(position_T, key_RT2.shape[:2]), vocab_size)


def _noise(request_ids, positions, vocab_size, seed=7):
    """f32[requests, positions, V]."""
    keys = np.stack([request_key(seed, r) for r in request_ids])
    return np.asarray(_gumbel(keys, np.asarray(positions, np.int32), vocab_size))


@pytest.mark.parametrize(
    "counter, key, num_rounds, expected",
    [
        ((0, 0), (0, 0), 13, (0x9D1C5EC6, 0x8BD50731)),
        (ONES, ONES, 13, (0xFD36D048, 0x2D17272C)),
        (PI_COUNTER, PI_KEY, 13, (0xBA3E4725, 0xF27D669E)),
        ((0, 0), (0, 0), 20, (0x6B200159, 0x99BA4EFE)),
        (ONES, ONES, 20, (0x1CB996FC, 0xBB002BE7)),
        (PI_COUNTER, PI_KEY, 20, (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_known_answers(counter, key, num_rounds, expected):
    """The kat_vectors of the Random123 distribution."""
    with np.errstate(over="ignore"):
        words = threefry2x32(*map(np.uint32, (*key, *counter)), num_rounds)
    assert tuple(int(w) for w in words) == expected
    on_device = jax.jit(threefry2x32, static_argnums=4)(*map(np.uint32, (*key, *counter)), num_rounds)
    assert tuple(int(w) for w in on_device) == expected


def test_request_keys_are_pinned():
    assert request_key(0, 0).tolist() == [0x6B200159, 0x99BA4EFE]
    assert request_key(7, 123).tolist() == [0x9A9B44CE, 0x702C5E28]
    assert request_key(2**40 + 5, 2**33 + 9).tolist() == [0x7DBEF664, 0xB8D1744C]
    assert request_key(2**64 - 1, 2**64 - 1).tolist() == [0x1CB996FC, 0xBB002BE7]
    assert request_key(0, 0).dtype == np.uint32


@pytest.mark.parametrize("seed, request_id", [(-1, 0), (0, -1), (2**64, 0), (0, 2**64)])
def test_request_key_refuses_what_does_not_fit_64_bits(seed, request_id):
    with pytest.raises(ValueError, match=rf"got seed {seed} and request id {request_id}, expected both in \[0, 2\^64"):
        request_key(seed, request_id)


def test_noise_is_pinned_by_value():
    """The same on every device and jax version: a change here changes every rollout."""
    np.testing.assert_allclose(
        _noise([123], [5, 6], 7)[0],
        [
            [-0.3618979, 1.0611746, -0.09010337, 0.22590645, 0.27786356, 0.18469131, 0.9433637],
            [0.9717723, 0.21767771, 0.85497856, 0.35658786, 2.3049796, -0.015052542, -0.92448425],
        ],
        rtol=2e-6,
    )


def test_noise_depends_on_request_and_position_alone():
    whole = _noise([3, 9, 2**35], list(range(40)), 50)
    for i, r in enumerate([3, 9, 2**35]):
        np.testing.assert_array_equal(whole[i], _noise([r], list(range(40)), 50)[0])
    np.testing.assert_array_equal(whole[1:, 17:19], _noise([9, 2**35], [17, 18], 50))
    np.testing.assert_array_equal(whole[:, [30, 4]], _noise([3, 9, 2**35], [30, 4], 50))
    key = jnp.asarray(request_key(7, 9))
    np.testing.assert_array_equal(whole[1, 11], gumbel(key, jnp.int32(11), 50))  # no batch axes, not jitted
    assert not np.array_equal(whole[0], _noise([3], list(range(40)), 50, seed=8)[0])


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 151])
def test_noise_has_one_value_per_token(vocab_size):
    values = _noise([1], list(range(64)), vocab_size)
    assert values.shape == (1, 64, vocab_size) and values.dtype == np.float32
    assert np.unique(values).size == values.size  # no word is used twice


def test_noise_is_finite_at_both_ends_of_the_generator(monkeypatch):
    for bits, expected in ((0, -np.log(-np.log1p(-(0.5 * 2.0**-32)))), (2**32 - 1, -np.log(24 * np.log(2)))):
        word = jnp.full((1,), bits, jnp.uint32)
        monkeypatch.setattr(noise, "threefry2x32", lambda *_, word=word: (word, word))
        values = gumbel(jnp.zeros(2, jnp.uint32), jnp.int32(0), 2)
        np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_moments_are_those_of_gumbel():
    values = _noise(list(range(64)), list(range(64)), 256).astype(np.float64)
    standard_error = np.sqrt(np.pi**2 / 6 / values.size)
    assert abs(values.mean() - np.euler_gamma) < 4 * standard_error
    assert abs(values.var() - np.pi**2 / 6) < 0.01
    # Uniform again after the inverse: the largest gap between the two distribution functions (Kolmogorov).
    uniform = np.sort(np.exp(-np.exp(-values)).ravel())
    assert np.abs(uniform - (np.arange(values.size) + 0.5) / values.size).max() < 1.63 / np.sqrt(values.size)


def test_neighbouring_positions_requests_and_tokens_are_uncorrelated():
    values = _noise(list(range(64)), list(range(64)), 256)
    for axis in range(3):
        size = values.shape[axis]
        head, tail = (np.take(values, range(i, size - 1 + i), axis).ravel() for i in (0, 1))
        assert abs(np.corrcoef(head, tail)[0, 1]) < 4 / np.sqrt(head.size)
    halves = values[..., :128].ravel(), values[..., 128:].ravel()  # the two words of one counter
    assert abs(np.corrcoef(*halves)[0, 1]) < 4 / np.sqrt(halves[0].size)


def test_argmax_of_logits_plus_noise_is_a_draw_from_softmax():
    logits = np.asarray([2.0, 1.0, 0.0, -1.0, 0.5, -3.0, 1.5, -8.0])
    draws = np.argmax(logits + _noise(list(range(20)), list(range(10_000)), 8), axis=-1)
    law = np.exp(logits) / np.exp(logits).sum()
    freq = np.bincount(draws.ravel(), minlength=8) / draws.size
    assert draws.size == 200_000
    assert np.abs(freq - law).sum() / 2 < 0.01
