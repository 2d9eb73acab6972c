"""Log-probs of the chunked head against a plain log-softmax, in value and gradient."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl import tiny
from tlt_jax.models.transformer import compute_logits, forward, init_params
from tlt_jax.rl.algorithms import preset
from tlt_jax.rl.batch import PackConfig
from tlt_jax.rl.logprobs import HeadConfig, head_logprobs, response_logprobs
from tlt_jax.rl.packing import make_micro_batches, scatter_rows

PACK = PackConfig(micro_batch_tokens=64, min_width=16)
UNTIED = dataclasses.replace(tiny.CONFIG, tie_embeddings=False, num_layers=2)


@functools.partial(jax.jit, static_argnums=1)
def _plain(params, config, tokens_BT, temperature):
    """All logits at once, one row per sequence: log-prob of token t + 1 and entropy at position t."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    logits_BTV = compute_logits(params, config, forward(params, config, tokens_BT, positions_BT).hidden)
    logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1] / temperature)
    logprobs_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], axis=2)[..., 0]
    return logprobs_BT, -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=2)


def _padded(batch):
    """Rows padded on the right, and the response positions of `_plain`'s outputs."""
    width = max(map(len, batch.tokens))
    tokens_BT = np.stack([np.pad(row, (0, width - len(row))) for row in batch.tokens])
    t_T = np.arange(width - 1)
    ends_B1 = np.array([len(row) - 1 for row in batch.tokens])[:, None]
    return jnp.asarray(tokens_BT), (t_T >= batch.prompt_lens[:, None] - 1) & (t_T < ends_B1)


def _micros(batch, pack=PACK):
    rows = np.arange(len(batch.tokens))
    return [jax.tree.map(jnp.asarray, m) for m in make_micro_batches(batch, rows, np.ones(len(rows)), pack)]


def _rows(micros, values, num_rows):
    parts = [(value, m.mask, m.row_index) for value, m in zip(values, micros, strict=True)]
    return scatter_rows(jax.device_get(parts), num_rows)


@functools.partial(jax.jit, static_argnums=1, static_argnames=("head_tokens",))
def _score(params, config, micro, temperature, head_tokens=2048):
    return response_logprobs(params, config, micro, temperature, head_tokens=head_tokens)


@pytest.mark.parametrize(("config", "head_tokens"), [(tiny.CONFIG, 1), (UNTIED, 8), (tiny.CONFIG, 4096)])
def test_packed_rows_equal_each_row_alone(config, head_tokens):
    """B14, B15: log-probs do not depend on padding, packing or chunking; slot i scores token i."""
    params = tiny.params(config=config)
    batch = tiny.batch(preset("grpo"), temperature=0.7)
    micros = _micros(batch)
    outs = [_score(params, config, m, jnp.float32(0.7), head_tokens=head_tokens) for m in micros]
    tokens_BT, is_response_BT = _padded(batch)
    for got, expected_BT in zip(zip(*outs, strict=True), _plain(params, config, tokens_BT, 0.7), strict=True):
        rows = _rows(micros, got, 6)
        for i, row in enumerate(rows):
            np.testing.assert_allclose(row, np.asarray(expected_BT)[i][is_response_BT[i]], atol=1e-5)
    assert all(not np.asarray(out[0])[~np.asarray(m.mask)].any() for out, m in zip(outs, micros, strict=True))


def test_amount_of_padding_changes_nothing():
    """B14: the same rows in bins of 16, 32 and 64 have the same log-probs."""
    batch = tiny.batch(preset("grpo"), prompt_lens=(4,), max_len=9)
    found = []
    for width in (16, 32, 64):
        micros = _micros(batch, PackConfig(micro_batch_tokens=width, min_width=width))
        values = [_score(tiny.params(), tiny.CONFIG, m, jnp.float32(1.0))[0] for m in micros]
        found.append(np.concatenate(_rows(micros, values, 2)))
    assert len(found[0]) == batch.response_lens.sum()
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    np.testing.assert_allclose(found[2], found[0], atol=1e-5)


def test_rows_with_bins_of_their_own_need_no_segments():
    """B14: without segment ids, right padding still changes nothing."""
    batch = tiny.batch(preset("grpo"))
    micros = _micros(batch, PackConfig(micro_batch_tokens=256, min_width=32, share_bins=False))
    expected = _rows(micros, [_score(tiny.params(), tiny.CONFIG, m, jnp.float32(1.0))[0] for m in micros], 6)
    alone = functools.partial(response_logprobs, is_packed=False)
    got = [jax.jit(alone, static_argnums=1)(tiny.params(), tiny.CONFIG, m, jnp.float32(1.0))[0] for m in micros]
    for a, b in zip(_rows(micros, got, 6), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_response_of_one_token_has_one_logprob():
    """B15: the first response token is scored from the last prompt position."""
    batch = tiny.batch(preset("grpo"), prompt_lens=(3,), max_len=1)
    micros = _micros(batch)
    values = _rows(micros, [_score(tiny.params(), tiny.CONFIG, m, jnp.float32(1))[0] for m in micros], 2)
    logprobs_BT, _ = _plain(tiny.params(), tiny.CONFIG, jnp.asarray(np.stack(batch.tokens)), 1.0)
    assert [len(value) for value in values] == [1, 1]
    np.testing.assert_allclose(np.concatenate(values), logprobs_BT[:, 2], atol=1e-5)


def _head(temperature, logits, chunk=1, dtype=jnp.float32):
    """The head on hidden states equal to the logits: identity weights."""
    logits = jnp.asarray(logits, dtype)
    V = logits.shape[-1]
    config = dataclasses.replace(tiny.CONFIG, vocab_size=V, hidden_size=V, num_valid_tokens=None)
    head = HeadConfig(model=config, chunk=chunk, entropy_grad=False)
    mask, targets = jnp.ones(logits.shape[:2], bool), jnp.zeros(logits.shape[:2], jnp.int32)
    return head_logprobs(head, jnp.eye(V), logits, targets, mask, jnp.float32(temperature))


def test_temperature_by_value():
    """B1: logits [2, 0] at temperature 0.5 and 1."""
    np.testing.assert_allclose(_head(0.5, [[[2.0, 0.0]]])[0], [[-0.01815]], atol=1e-5)
    np.testing.assert_allclose(_head(1.0, [[[2.0, 0.0]]])[0], [[-0.12693]], atol=1e-5)


def test_entropy_by_value():
    np.testing.assert_allclose(_head(1.0, [[[0.0, 0.0, 0.0, 0.0]]])[1], [[np.log(4)]], rtol=1e-6)
    np.testing.assert_allclose(_head(1.0, [[[200.0, 0.0]]])[1], [[0.0]], atol=1e-6)


def test_log_softmax_is_f32_for_bf16_models():
    """B19: bf16 activations give f32 log-probs, equal to an f32 log-softmax of the same logits."""
    logits = jax.random.normal(jax.random.key(0), (1, 4, 300)) * 4
    logprobs, _ = _head(1.0, logits, dtype=jnp.bfloat16)
    assert logprobs.dtype == jnp.float32
    expected = jax.nn.log_softmax(logits.astype(jnp.bfloat16).astype(jnp.float32))[..., 0]
    np.testing.assert_array_equal(np.asarray(logprobs), np.asarray(expected))


def test_ids_the_tokenizer_lacks_are_outside_the_softmax():
    """D9: growing the logits of padded ids changes no log-prob, and they get no gradient from the head."""
    config = dataclasses.replace(UNTIED, num_valid_tokens=30)
    params = tiny.params(config=config)
    batch = tiny.batch(preset("grpo"), vocab=30)
    (micro, *_) = _micros(batch)

    @jax.jit
    def total(weight):
        changed = params | {"head": {"weight": weight}}
        return jnp.sum(response_logprobs(changed, config, micro, jnp.float32(1.0))[0])

    weight = params["head"]["weight"]
    grown = weight.at[30:].mul(50.0)
    assert float(total(weight)) == float(total(grown))
    grad = jax.jit(jax.grad(total))(grown)
    assert not np.asarray(grad[30:]).any() and np.asarray(grad[:30]).any()


@pytest.mark.parametrize(("config", "head_tokens"), [(tiny.CONFIG, 8), (UNTIED, 4096)])
def test_gradients_equal_plain_autodiff(config, head_tokens):
    """The written-out backward of the head, with entropy, remat and skipped chunks, against plain autodiff."""
    params = tiny.params(config=config)
    batch = tiny.batch(preset("grpo"))
    micros = _micros(batch)
    tokens_BT, is_response_BT = _padded(batch)

    def chunked(params, micro):
        logprobs_BT, entropies_BT = response_logprobs(
            params, config, micro, jnp.float32(0.8), head_tokens=head_tokens, remat=True, entropy_grad=True
        )
        return jnp.sum(jnp.where(micro.mask, jnp.sin(logprobs_BT) + 0.3 * entropies_BT, 0.0))

    def plain(params):
        logprobs_BT, entropies_BT = _plain(params, config, tokens_BT, 0.8)
        return jnp.sum(jnp.where(is_response_BT, jnp.sin(logprobs_BT) + 0.3 * entropies_BT, 0.0))

    chunked_grad = jax.jit(jax.grad(chunked))
    got = jax.tree.map(lambda *parts: sum(parts), *(chunked_grad(params, micro) for micro in micros))
    expected = jax.jit(jax.grad(plain))(params)
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * scale)


def test_logits_of_the_whole_batch_are_never_held():
    """B19: the largest intermediate with a vocabulary axis has `head_tokens` rows, forward and backward."""
    config = dataclasses.replace(tiny.CONFIG, vocab_size=1000, num_valid_tokens=None)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    (micro,) = _micros(tiny.batch(preset("grpo"), prompt_lens=(4,), max_len=9))[:1]

    def total(params):
        return jnp.sum(response_logprobs(params, config, micro, jnp.float32(1.0), head_tokens=16)[0])

    text = jax.jit(jax.grad(total)).lower(params).as_text()
    rows = {int(b) * int(c) for b, c in re.findall(r"tensor<(\d+)x(\d+)x1000xf32>", text)}
    assert rows and max(rows) <= 16
