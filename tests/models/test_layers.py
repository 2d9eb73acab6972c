import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout.tiny import MODEL
from tlt_jax.models import layers

RNG = np.random.default_rng(0)


def _normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (2, 3), (65,), (8, 9)], ids=str)
def test_matmul_is_x_times_w_transposed_in_every_form(platform, lead):
    x, w = _normal(*lead, 16), _normal(7, 16)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    y = layers.matmul(x, w, platform)
    assert y.dtype == jnp.float32 and y.shape == (*lead, 7)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    low = layers.matmul(x.astype(jnp.bfloat16), w, platform)
    assert low.dtype == jnp.float32  # bf16 factors, f32 sum
    np.testing.assert_allclose(low, expected, atol=0.1)
    assert layers.matmul(x, w, platform, out_dtype="bfloat16").dtype == jnp.bfloat16


def test_norm_computes_in_f32():
    config = MODEL.__class__(**{**MODEL.__dict__, "dtype": "bfloat16"})
    x = jnp.asarray([[3e4, -3e4, 1e4, 2e4]], jnp.bfloat16)  # squares overflow nothing in f32
    y = layers.RMSNorm(config).apply({"params": {"scale": jnp.full(4, 2.0)}}, x)
    exact = np.asarray(x, np.float64)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), 2 * exact / np.sqrt((exact**2).mean()), rtol=1e-2)


def test_norm_by_hand():
    y = layers.RMSNorm(MODEL).apply({"params": {"scale": jnp.asarray([1.0, 2.0])}}, jnp.asarray([3.0, 4.0]))
    np.testing.assert_allclose(y, np.asarray([3.0, 8.0]) / np.sqrt(12.5 + 1e-6), rtol=1e-6)


def test_linear_adds_its_bias():
    params = {"weight": jnp.asarray([[1.0, 2.0]]), "bias": jnp.asarray([0.5])}
    x = jnp.asarray([[[3.0, 4.0]]])
    assert layers.Linear(1, True, MODEL).apply({"params": params}, x).tolist() == [[[11.5]]]
    assert layers.Linear(1, False, MODEL).apply({"params": params}, x).tolist() == [[[11.0]]]


def test_rope_rotates_the_halves():
    """D7: q = [1,0,0,0] at position 1 gives [.5403, 0, .8415, 0], not [.5403, .8415, 0, 0]."""
    config = MODEL.__class__(**{**MODEL.__dict__, "head_dim": 4})
    cos, sin = layers.rope_tables(config, jnp.asarray([[1]]))
    rotated = layers.apply_rope(jnp.asarray([[[[1.0, 0.0, 0.0, 0.0]]]]), cos, sin)
    np.testing.assert_allclose(rotated[0, 0, 0], [0.5403, 0.0, 0.8415, 0.0], atol=1e-4)
    rotated = layers.apply_rope(jnp.asarray([[[[0.0, 1.0, 0.0, 0.0]]]]), cos, sin)
    np.testing.assert_allclose(rotated[0, 0, 0], [0.0, np.cos(0.01), 0.0, np.sin(0.01)], atol=1e-6)


def test_rope_scores_depend_on_distance_alone():
    q, k = _normal(1, 1, 1, 8), _normal(1, 1, 1, 8)

    def score(i, j):
        a, b = (layers.apply_rope(x, *layers.rope_tables(MODEL, jnp.asarray([[n]]))) for x, n in ((q, i), (k, j)))
        return float(jnp.sum(a * b))

    np.testing.assert_allclose([score(9, 4), score(105, 100)], score(5, 0), atol=1e-4)


def _attention(q, k, v, mask):
    """Row by row, in f64."""
    B, T, N, H = q.shape
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((B, T, N, H))
    for b, t, n in np.ndindex(B, T, N):
        seen = np.flatnonzero(mask[b, t])
        score = k[b, seen, n * k.shape[2] // N] @ q[b, t, n] / np.sqrt(H)
        p = np.exp(score - score.max())
        out[b, t, n] = p / p.sum() @ v[b, seen, n * k.shape[2] // N]
    return out


def test_uncached_attention_is_causal_inside_segments():
    q, k, v = _normal(2, 9, 4, 8), _normal(2, 9, 2, 8), _normal(2, 9, 2, 8)
    causal = np.tril(np.ones((9, 9), bool))[None].repeat(2, 0)
    np.testing.assert_allclose(layers.attend_uncached(q, k, v, None, "cpu"), _attention(q, k, v, causal), atol=1e-5)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0], [0, 0, 5, 5, 5, 5, 7, 7, 7]])
    mask = causal & (np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None])
    np.testing.assert_allclose(layers.attend_uncached(q, k, v, segments, "cpu"), _attention(q, k, v, mask), atol=1e-5)


@pytest.mark.parametrize("num_tokens", [11, 16])
def test_blocks_of_queries_change_nothing(num_tokens, monkeypatch):
    """Values and gradients, for lengths that are whole blocks and for others."""
    q, k, v = _normal(2, num_tokens, 4, 8), _normal(2, num_tokens, 2, 8), _normal(2, num_tokens, 2, 8)
    segments = jnp.asarray(RNG.integers(0, 3, (2, num_tokens)).cumsum(1))
    for ids in (None, segments):

        def loss(q, k, v, ids=ids):
            return jnp.sum(jnp.sin(layers.attend_uncached(q, k, v, ids, "cpu")))

        whole = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
        with monkeypatch.context() as patch:
            patch.setattr(layers, "_QUERY_BLOCK", 8)
            blocked = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5, atol=1e-5), whole, blocked)


def test_score_memory_grows_with_the_length_and_not_its_square():
    """One prime number of tokens, so that no whole number of blocks fits: [B,N,512,T] scores, not [B,N,T,T]."""
    T = 4099
    shapes = [jax.ShapeDtypeStruct((1, T, n, 8), jnp.float32) for n in (2, 1, 1)]
    program = jax.jit(lambda q, k, v: layers.attend_uncached(q, k, v, None, "cpu")).lower(*shapes).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2 * T * T * 4 / 2


def test_cached_attention_sees_what_its_mask_says():
    q, k, v = _normal(2, 3, 4, 8), _normal(2, 10, 2, 8), _normal(2, 10, 2, 8)
    mask = RNG.random((2, 3, 10)) < 0.5
    mask[..., 0] = True
    out = layers.attend_cached(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), jnp.asarray(mask))
    np.testing.assert_allclose(out, _attention(q, k, v, mask), atol=1e-5)
    blind = layers.attend_cached(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), jnp.zeros((2, 3, 10), bool))
    assert np.isfinite(blind).all()
