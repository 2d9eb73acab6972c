import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.parity_models import FAMILIES
from tests.rollout.tiny import MODEL, lively, tiny_params
from tlt_jax.models.cache import init_cache, with_row_axis, without_row_axis
from tlt_jax.models.layers import MASKED
from tlt_jax.models.transformer import (
    compute_logits,
    decode_layout,
    forward,
    forward_cached,
    init_params,
    param_shapes,
)

LEN = 40
TOKENS = jnp.asarray(np.random.default_rng(5).integers(4, 90, (2, LEN)), jnp.int32)


@functools.cache
def _params(name):
    return lively(init_params(FAMILIES[name], jax.random.key(1)))


@functools.partial(jax.jit, static_argnums=(1, 4))
def _hidden(params, model, tokens, positions, segmented, segments):
    return forward(params, model, tokens, positions, segment_ids_BT=segments if segmented else None).hidden


def _full(tokens, positions=None, segments=None, model=MODEL, params=None):
    """Final hidden states of a full forward."""
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    ids = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments)
    return _hidden(params or tiny_params(), model, tokens, jnp.asarray(positions), segments is not None, ids)


@functools.partial(jax.jit, static_argnums=1)
def _append(params, model, tokens, start, cache, positions, mask):
    out, cache = forward_cached(params, model, tokens, start, cache, positions_BT=positions, block_mask=mask)
    return out.hidden, cache


def _cached(tokens, start, cache, positions=None, mask=None, model=MODEL, params=None):
    return _append(params or tiny_params(), model, jnp.asarray(tokens), jnp.asarray(start), cache, positions, mask)


def _logprobs(hidden, tokens):
    """f32[B,T-1] of each token after the first."""
    logits = compute_logits(tiny_params(), MODEL, hidden[:, :-1])
    return jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]


@pytest.fixture(scope="module")
def whole():
    return _full(TOKENS)


@pytest.mark.parametrize("name", ["smollm2", "qwen2"])
def test_cached_chunks_equal_the_whole_forward(name):
    """Rows at different offsets: row 0 is 5 tokens ahead of row 1 all the way."""
    model, params = FAMILIES[name], _params(name)
    tokens = TOKENS[:, :20]
    expected = _full(tokens, model=model, params=params)
    cache = init_cache(model, 2, 32, "float32")
    _, cache = _cached(tokens[:, :8], [0, 0], cache, model=model, params=params)
    start = jnp.asarray([8, 3])
    for _ in range(3):
        chunk = jnp.take_along_axis(tokens, start[:, None] + jnp.arange(4), axis=1)
        hidden, cache = _cached(chunk, start, cache, model=model, params=params)
        for row in range(2):
            s = int(start[row])
            np.testing.assert_allclose(hidden[row], expected[row, s : s + 4], atol=2e-5)
        start = start + 4


@pytest.mark.parametrize("name", FAMILIES)
def test_the_decode_layout_computes_the_same(name):
    """Biases and per-head norms included; with the row axis of the cache and without."""
    config = dataclasses.replace(FAMILIES[name], platform="cpu", num_layers=1)
    params = lively(init_params(config, jax.random.key(0)))
    layout = decode_layout(params, config)
    assert set(layout["layers_0"]["attn"]) - {"q_norm", "k_norm"} == {"qkv", "o"}
    assert set(layout["layers_0"]["mlp"]) == {"gate_up", "down"}
    assert sum(x.size for x in jax.tree.leaves(layout)) == sum(x.size for x in jax.tree.leaves(params))
    assert decode_layout(params, dataclasses.replace(config, platform="cuda")) is params
    assert decode_layout(layout, config) is layout
    tokens = jnp.asarray([[5, 3, 9]])
    cache = init_cache(config, 1, 16, "float32")
    start = jnp.asarray([2])
    expected, expected_cache = forward_cached(params, config, tokens, start, cache)
    got, got_cache = forward_cached(layout, config, tokens, start, without_row_axis(cache))
    np.testing.assert_allclose(got.hidden, expected.hidden, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), with_row_axis(got_cache), expected_cache)


def test_padding_left_or_right_changes_nothing(whole):
    """B14: 0, 3 and 17 pads on either side, positions from the valid tokens, segment 0 for the pads."""
    expected = _logprobs(whole[:, :20], TOKENS[:, :20])
    for left, right in ((0, 20), (3, 17), (17, 3), (20, 0)):
        pad = ((0, 0), (left, right))
        tokens = jnp.pad(TOKENS[:, :20], pad, constant_values=7)
        segments = jnp.pad(jnp.ones((2, 20), jnp.int32), pad)
        positions = jnp.clip(jnp.arange(LEN) - left, 0)[None].repeat(2, 0)
        hidden = _full(tokens, positions, segments)
        np.testing.assert_allclose(
            _logprobs(hidden, tokens)[:, left : left + 19], expected, atol=1e-5, err_msg=f"{left} pads"
        )
    np.testing.assert_allclose(_logprobs(whole, TOKENS)[:, :19], expected, atol=1e-5)  # right pads need no segments


def test_packed_segments_equal_each_alone(whole):
    """F9's kind: two documents in one row, with positions of their own."""
    row = jnp.concatenate([TOKENS[:1, :15], TOKENS[1:, :25]], axis=1)
    segments = jnp.asarray([[1] * 15 + [2] * 25])
    positions = jnp.asarray([[*range(15), *range(25)]])
    packed = _full(row, positions, segments)
    np.testing.assert_allclose(packed[0, :15], whole[0, :15], atol=2e-5)
    np.testing.assert_allclose(packed[0, 15:], whole[1, :25], atol=2e-5)


def test_stale_slots_are_never_read():
    """A20: slots past a row's length may hold anything; the next hidden states are the same, bit for bit."""
    cache = init_cache(MODEL, 2, 64, "float32")
    _, cache = _cached(TOKENS[:, :16], [0, 0], cache)
    start = jnp.asarray([16, 9])

    def poison(x, axis):
        shape = [2, 1, 1, 1]
        stale = jnp.arange(64).reshape([64 if a == axis else 1 for a in range(4)]) >= start.reshape(shape)
        return jnp.where(stale, 1e9, x)

    bad = tuple(layer.replace(k=poison(layer.k, 3), v=poison(layer.v, 2)) for layer in cache)
    good_hidden, _ = _cached(TOKENS[:, 16:18], start, cache)
    bad_hidden, _ = _cached(TOKENS[:, 16:18], start, bad)
    np.testing.assert_array_equal(good_hidden, bad_hidden)


# A draft tree: node 0 the root, 1 and 2 its children, 3 and 4 children of 1, 5 a child of 2.
PARENTS = [-1, 0, 0, 1, 1, 2]


def _path(node):
    return [] if node < 0 else [*_path(PARENTS[node]), node]


def test_tree_nodes_see_prompt_ancestors_and_self_only():
    """A27: each node's state is that of a sequence made of the prompt and its path; siblings share a position."""
    mask = np.zeros((6, 6), bool)
    for node in range(6):
        mask[node, _path(node)] = True
    depth = np.asarray([len(_path(n)) - 1 for n in range(6)])
    nodes = np.asarray([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]], np.int32)
    cache = init_cache(MODEL, 2, 64, "float32")
    _, cache = _cached(TOKENS[:, :16], [0, 0], cache)
    start = np.asarray([12, 7])  # ragged: what lies between 7 and 16 in row 1 is stale
    hidden, after = _cached(nodes, start, cache, positions=start[:, None] + depth, mask=jnp.asarray(mask))
    for row in range(2):
        prompt = np.asarray(TOKENS[row, : start[row]])
        paths = [[*prompt, *nodes[row, _path(n)]] for n in range(6)]
        padded = np.asarray([p + [0] * (LEN - len(p)) for p in paths], np.int32)
        expected = _full(padded)
        for n, p in enumerate(paths):
            np.testing.assert_allclose(hidden[row, n], expected[n, len(p) - 1], atol=2e-5)
    per_row = jnp.broadcast_to(jnp.asarray(mask), (2, 6, 6))
    again, _ = _cached(nodes, start, cache, positions=start[:, None] + depth, mask=per_row)
    np.testing.assert_array_equal(hidden, again)
    assert after[0].k.shape == cache[0].k.shape


def test_a_lower_triangular_block_is_the_default():
    cache = init_cache(MODEL, 2, 64, "float32")
    _, cache = _cached(TOKENS[:, :16], [0, 0], cache)
    default, _ = _cached(TOKENS[:, 16:22], [16, 10], cache)
    masked, _ = _cached(TOKENS[:, 16:22], [16, 10], cache, mask=jnp.tril(jnp.ones((6, 6), bool)))
    np.testing.assert_allclose(default, masked, atol=1e-6)


def test_features_are_layer_outputs_before_the_final_norm():
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    whole = jax.jit(forward, static_argnames=("config", "feature_layers"))
    out = whole(tiny_params(), MODEL, TOKENS[:, :8], positions, feature_layers=(0, 1))
    assert [f.shape for f in out.features] == [(2, 8, 32)] * 2
    last = np.asarray(out.features[1], np.float64)
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(tiny_params()["final_norm"]["scale"])
    np.testing.assert_allclose(out.hidden, normed, atol=1e-5)
    cached, _ = jax.jit(forward_cached, static_argnames=("config", "feature_layers"))(
        tiny_params(),
        MODEL,
        TOKENS[:, :8],
        jnp.zeros(2, jnp.int32),
        init_cache(MODEL, 2, 16, "float32"),
        feature_layers=(0,),
    )
    np.testing.assert_allclose(cached.features[0], out.features[0], atol=1e-5)
    assert jax.eval_shape(lambda: forward(tiny_params(), MODEL, TOKENS[:, :8], positions)).features == ()


def test_logits_mask_ids_that_are_no_tokens():
    """D9; D1 and D2: a tied head is the embedding, an untied one is not."""
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32)), jnp.float32)
    head, embed = (tiny_params()[name]["weight"] for name in ("head", "embed"))
    logits = compute_logits(tiny_params(), MODEL, hidden)
    assert logits.dtype == jnp.float32 and (logits[:, 90:] == MASKED).all()
    np.testing.assert_allclose(logits[:, :90], (hidden @ head.T)[:, :90], atol=1e-4)
    tied = dataclasses.replace(MODEL, tie_embeddings=True, num_valid_tokens=None)
    np.testing.assert_allclose(compute_logits(tiny_params(), tied, hidden), hidden @ embed.T, atol=1e-4)


def test_bf16_compute_keeps_f32_logits_near_the_f32_ones(whole):
    """B19: activations in bf16, norms, softmax and logits in f32."""
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    hidden = _full(TOKENS, model=model)
    assert hidden.dtype == jnp.bfloat16
    low, high = (compute_logits(tiny_params(), MODEL, h)[..., :90] for h in (hidden, whole))
    assert low.dtype == jnp.float32
    assert float(jnp.abs(low - high).mean()) < 0.03 * float(high.std())


@pytest.mark.parametrize("name", FAMILIES)
def test_param_shapes_are_those_of_init_params(name):
    c = FAMILIES[name]
    params = jax.eval_shape(lambda: init_params(c, jax.random.key(0), "bfloat16"))
    assert param_shapes(c, "bfloat16") == params
    assert ("head" in params) == (not c.tie_embeddings)
    assert params["layers_0"]["attn"]["q"]["weight"].shape == (c.num_heads * c.head_dim, c.hidden_size)
    assert params["layers_1"]["attn"]["o"]["weight"].shape == (c.hidden_size, c.num_heads * c.head_dim)
    assert ("bias" in params["layers_0"]["attn"]["k"]) == c.attention_bias
    assert ("bias" in params["layers_0"]["attn"]["o"]) == c.output_bias


def test_remat_changes_memory_and_not_gradients():
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))

    def loss(params, remat):
        return jnp.sum(jnp.sin(forward(params, MODEL, TOKENS[:, :12], positions, remat=remat).hidden))

    plain, recomputed = (jax.jit(jax.grad(functools.partial(loss, remat=r)))(tiny_params()) for r in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, recomputed)
    assert all(np.abs(g).max() > 0 for name, g in plain["layers_0"]["attn"]["q"].items())
