import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.drafter.shapes import TARGET, make, random_inputs
from tlt_jax.drafter import model
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.unroll import unroll, valid_rows
from tlt_jax.models.cache import init_cache
from tlt_jax.models.config import ModelConfig

QWEN_7B = dict(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4
)
QWEN_32B = dict(
    vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_layers=64, num_heads=40, num_kv_heads=8
)
LLAMA_8B = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8
)
LLAMA_70B = dict(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8
)


def num_params(config):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(model.draft_param_shapes(config)))


@pytest.mark.parametrize(
    ("shape", "bias", "expected"),
    [
        (QWEN_7B, True, 258_744_320),
        (QWEN_32B, True, 540_028_928),
        (LLAMA_8B, False, 251_662_336),
        (LLAMA_70B, False, 989_863_936),
    ],
)
def test_parameter_counts_are_the_published_ones(shape, bias, expected):
    target = ModelConfig(**shape, head_dim=128, rope_theta=1e6, attention_bias=bias)
    assert num_params(DraftConfig(target=target)) == expected


def test_eagle3_has_three_times_the_features_and_a_head_of_its_own():
    target = ModelConfig(**LLAMA_8B, head_dim=128, rope_theta=5e5)
    config = DraftConfig(target=target, form="eagle3", draft_vocab_size=32000)
    shapes = model.draft_param_shapes(config)
    assert shapes["fc"]["weight"].shape == (4096, 3 * 4096)
    assert shapes["layer"]["attn"]["k"]["weight"].shape == (1024, 2 * 4096)
    assert shapes["head"]["weight"].shape == (32000, 4096)
    assert config.feature_layers == (1, 15, 28)  # the outputs that enter layers 2, 16 and 29
    assert "bias" not in shapes["layer"]["attn"]["q"]


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_head_dim_need_not_be_a_share_of_the_width(form):
    """D8."""
    draft_params = make(form)[1]
    width = 32 if form == "eagle" else 64
    assert draft_params["layer"]["attn"]["q"]["weight"].shape == (64, width)
    assert draft_params["layer"]["attn"]["o"]["weight"].shape == (32, 64)


forward = jax.jit(model.draft_forward, static_argnums=2)
forward_cached = jax.jit(model.draft_forward_cached, static_argnums=2)
logits_of = jax.jit(model.draft_logits, static_argnums=2)


@pytest.mark.parametrize(("form", "block"), [("eagle", 4), ("eagle3", 512)])
def test_every_unroll_step_is_sequential_decoding(form, block, monkeypatch):
    """F6, F7: logits of the training path equal those of the decode path, at every step and row (1e-5)."""
    monkeypatch.setattr("tlt_jax.drafter.unroll._QUERY_BLOCK", block)
    config, draft_params, target_params = make(form)
    args = (draft_params, target_params, config)
    features, tokens = random_inputs(config, 1, 12)
    positions, segments = jnp.arange(12)[None], jnp.ones((1, 12), jnp.int32)
    h_UBTD = jax.jit(unroll, static_argnums=(2, 7))(*args, features, tokens, positions, segments, 4)
    np.testing.assert_allclose(h_UBTD[0], forward(*args, features, tokens, positions, segments), atol=1e-5)
    trained = logits_of(*args, h_UBTD[:, 0])  # [U,T,V]

    # One row of a batch for each start; what the ingest wrote beyond it is stale and gets overwritten.
    starts, rows = jnp.array([0, 2, 7]), jnp.arange(3)
    batch = [jnp.repeat(x, 3, axis=0) for x in (features, tokens)]
    cache = init_cache(config.layer, 3, 16, "float32")[0]
    h, cache = forward_cached(*args, *batch, jnp.zeros(3, jnp.int32), cache)
    h = h[rows, starts][:, None]
    for s in range(4):
        if s:
            h, cache = forward_cached(*args, h, batch[1][rows, starts + s][:, None], starts + s, cache)
        np.testing.assert_allclose(logits_of(*args, h)[:, 0], trained[s, starts + s], atol=1e-5)


def test_row_t_stands_at_position_t_and_slot_t():
    """F6: the cached path's default slots and positions are those of training; another position gives another value."""
    config, draft_params, target_params = make()
    features, tokens = random_inputs(config, 1, 6)
    args = (draft_params, target_params, config, features, tokens)
    trained = forward(*args, jnp.arange(6)[None])
    cache = init_cache(config.layer, 1, 12, "float32")[0]
    decoded, cache = forward_cached(*args, jnp.array([0]), cache)
    np.testing.assert_allclose(trained, decoded, atol=1e-5)
    written = np.abs(np.asarray(cache.v[0, 0])).sum(-1) > 0
    assert written.tolist() == [True] * 6 + [False] * 6
    again, _ = forward_cached(
        *(draft_params, target_params, config, features[:, 5:], tokens[:, 5:]),
        jnp.array([5]),
        cache,
        positions_BT=jnp.array([[6]]),
    )
    assert float(jnp.abs(again - decoded[:, 5:]).max()) > 1e-3


def test_a_tree_of_drafts_equals_its_branches():
    """Two siblings at the same position, written beside each other, give what each gives alone."""
    config, draft_params, target_params = make()
    features, tokens = random_inputs(config, 1, 6)
    cache = init_cache(config.layer, 1, 12, "float32")[0]
    args = (draft_params, target_params, config)
    h, cache = forward_cached(*args, features, tokens, jnp.array([0]), cache)
    pair, guess = jnp.array([[3, 7]]), jnp.repeat(h[:, -1:], 2, axis=1)
    both, _ = forward_cached(
        *args, guess, pair, jnp.array([6]), cache, positions_BT=jnp.array([[6, 6]]), block_mask=jnp.eye(2, dtype=bool)
    )
    for i in range(2):
        one = guess[:, i : i + 1], pair[:, i : i + 1]
        alone, _ = forward_cached(*args, *one, jnp.array([6]), cache, positions_BT=jnp.array([[6]]))
        np.testing.assert_allclose(both[:, i], alone[:, 0], atol=1e-5)


def test_rows_valid_at_a_step_have_their_start_in_the_mask():
    mask = jnp.array([[0, 0, 1, 1, 1, 0, 1, 1, 0, 0]], bool)
    segments = jnp.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]])
    valid = valid_rows(mask, segments, 3)[:, 0]
    assert [np.flatnonzero(v).tolist() for v in valid] == [[2, 3, 4, 6, 7], [3, 4, 7], [4]]


def test_gradient_reaches_no_parameter_of_the_target():
    """F9."""
    config, draft_params, target_params = make()
    features, tokens = random_inputs(config, 1, 6)

    def loss(target_params, draft_params):
        h = model.draft_forward(draft_params, target_params, config, features, tokens, jnp.arange(6)[None])
        return jnp.sum(model.draft_logits(draft_params, target_params, config, h) ** 2)

    target_grads, draft_grads = jax.jit(jax.grad(loss, (0, 1)))(target_params, draft_params)
    assert all(not np.any(g) for g in jax.tree.leaves(target_grads))
    assert all(np.any(g) for g in jax.tree.leaves(draft_grads) if g.ndim == 2)


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_reduced_vocabulary_needs_its_map(form):
    """F4: no silent first ids; F3: the rows are those of i + d2t[i]."""
    config, draft_params, target_params = make(form, draft_vocab_size=3)
    h = jnp.ones((1, 32))
    d2t = jnp.array([0, 4, 7])
    with pytest.raises(ValueError, match="load the map"):
        model.draft_logits(draft_params, target_params, config, h)
    with pytest.raises(ValueError, match="load the map"):
        model.draft_logits(draft_params, target_params, config, h, d2t[:2])
    logits = logits_of(draft_params, target_params, config, h, d2t)
    assert logits.shape == (1, 3)
    assert model.to_target_ids(jnp.arange(3), d2t).tolist() == [0, 5, 9]
    if form == "eagle":
        full = make(form)[0]
        expected = logits_of(draft_params, target_params, full, h)[:, jnp.array([0, 5, 9])]
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        with pytest.raises(ValueError, match="whole vocabulary"):
            model.draft_logits(draft_params, target_params, full, h, d2t)


def test_ids_beyond_the_tokenizer_are_never_proposed():
    """D9."""
    config, draft_params, target_params = make(tie_embeddings=True)
    config = dataclasses.replace(config, target=dataclasses.replace(config.target, num_valid_tokens=90))
    logits = logits_of(draft_params, target_params, config, jnp.ones((2, 32)))
    assert float(logits[:, 90:].max()) < -1e29 < float(logits[:, :90].min())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"form": "medusa"}, "eagle, eagle3"),
        ({"form": "eagle3"}, "three different layers"),  # four layers have no default
        ({"form": "eagle3", "feature_layers": (0, 2, 1)}, "ascending"),
        ({"feature_layers": (0, 1, 2)}, "last layer only"),
        ({"draft_vocab_size": 97}, "0 .all. to 96"),
        ({"layer": dataclasses.replace(TARGET, hidden_size=64)}, "hidden size 64"),
    ],
)
def test_bad_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DraftConfig(target=TARGET, **fields)
