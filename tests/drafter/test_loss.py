import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.drafter.shapes import loss_and_grads, make, random_inputs
from tlt_jax.drafter import laws, model
from tlt_jax.drafter.config import LossConfig, loss_preset
from tlt_jax.drafter.head_loss import Rows, gather_frozen, head_loss
from tlt_jax.drafter.loss import DraftBatch, count_rows, draft_loss
from tlt_jax.drafter.unroll import unroll, valid_rows

SEGMENTS = jnp.array([[1] * 7 + [2] * 3, [1] * 8 + [0] * 2])
POSITIONS = jnp.array([[*range(7), *range(3)], [*range(8), 0, 0]])
MASK = jnp.array([[0, 0, 1, 1, 1, 0, 0, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]], bool)
D2T = jnp.cumsum(jnp.arange(40) % 2)  # ids 0, 2, 3, 5, 6, ...


def make_batch(config, seed=0):
    features, tokens = random_inputs(config, 2, 10, seed)
    hidden = random_inputs(dataclasses.replace(config, form="eagle", feature_layers=()), 2, 10, seed + 1)[0]
    return DraftBatch(
        features=features,
        tokens=tokens,
        positions=POSITIONS,
        segment_ids=SEGMENTS,
        mask=MASK,
        hidden=hidden if config.form == "eagle3" else None,
    )


def head_reference(h_UBTD, own, target_params, config, loss, batch, d2t):
    """Logit loss f32[U,B,T-1] of every row by definition: all logits, no chunks."""
    hidden = batch.features if batch.hidden is None else batch.hidden
    ids = jnp.arange(config.vocab_size) + (0 if d2t is None else d2t)
    head = target_params["head"]["weight"]
    kept = jnp.ones(len(head), bool) if loss.full_target else jnp.zeros(len(head), bool).at[ids].set(True)
    logits = jnp.where(kept, hidden[:, 1:] @ head.T / loss.temperature, -1e30)
    log_p = jax.nn.log_softmax(logits)[..., ids]
    outside = 1 - jnp.exp(log_p).sum(-1) if d2t is not None else jnp.zeros(log_p.shape[:-1])
    is_label = batch.tokens[:, 1:, None] == ids
    label = jnp.where(is_label.any(-1), jnp.argmax(is_label, -1), -1)
    log_q = model.draft_logits(own, target_params, config, h_UBTD[:, :, :-1], d2t)
    log_q = jax.nn.log_softmax(log_q / loss.temperature)
    return jnp.stack([laws.row_loss(loss.logit_loss, log_p, q, outside, label) for q in log_q])


def reference(draft_params, target_params, config, loss, batch, d2t):
    """The whole loss by definition."""
    h_UBTD = unroll(
        *(draft_params, target_params, config, batch.features, batch.tokens),
        *(batch.positions, batch.segment_ids, loss.num_steps),
    )
    hidden = batch.features if batch.hidden is None else batch.hidden
    rows = loss.logit_weight * head_reference(h_UBTD, draft_params, target_params, config, loss, batch, d2t)
    gap = jnp.abs(h_UBTD[:, :, :-1] - hidden[:, 1:])
    rows += loss.feature_weight * jnp.mean(jnp.where(gap < 1, gap**2 / 2, gap - 0.5), -1)
    valid_UBT = valid_rows(batch.mask, batch.segment_ids, loss.num_steps)[:, :, :-1]
    means_U = jnp.sum(rows * valid_UBT, (1, 2)) / jnp.sum(valid_UBT, (1, 2))
    return jnp.dot(means_U, loss.step_decay ** jnp.arange(loss.num_steps))


def setup(form, d2t, **fields):
    config, draft_params, target_params = make(form, draft_vocab_size=0 if d2t is None else len(d2t))
    loss = LossConfig(**({"feature_weight": 0.0} if form == "eagle3" else {}), **fields)
    return config, draft_params, target_params, loss, make_batch(config)


CASES = pytest.mark.parametrize(
    ("form", "d2t", "fields"),
    [
        ("eagle", None, {"num_steps": 2, "chunk_rows": 3}),
        ("eagle", D2T, {"logit_loss": "lk", "full_target": True, "temperature": 0.7}),
        ("eagle3", D2T, {"num_steps": 2, "logit_loss": "coupling", "logit_weight": 1.0}),
    ],
)


def assert_close_trees(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6 + 1e-4 * float(jnp.abs(y).max()))


@CASES
def test_chunked_heads_equal_the_definition(form, d2t, fields):
    """Value and gradients, with respect to the drafter's outputs and to a head of its own."""
    config, draft_params, target_params, loss, batch = setup(form, d2t, **fields)
    valid_UBT = valid_rows(batch.mask, batch.segment_ids, loss.num_steps)
    weight_U = jnp.array([0.3, 0.2])[: loss.num_steps]
    hidden = batch.features if batch.hidden is None else batch.hidden
    rows = Rows(
        hidden_MD=jnp.roll(hidden, -1, axis=1).reshape(20, -1),
        label_M=jnp.roll(batch.tokens, -1, axis=1).reshape(-1),
        valid_UM=valid_UBT.reshape(loss.num_steps, -1),
        scale_U=weight_U,
    )
    own = {name: draft_params[name] for name in ("final_norm", "head") if name in draft_params}
    h_UBTD = random_inputs(make("eagle")[0], 2 * loss.num_steps, 10, seed=5)[0].reshape(loss.num_steps, 2, 10, 32)

    def chunked(h_UBTD, own):
        frozen = gather_frozen(target_params, config, loss, d2t)
        return head_loss((config, loss), h_UBTD.reshape(loss.num_steps, 20, -1), own, frozen, rows)

    def definition(h_UBTD, own):
        loss_UBT = head_reference(h_UBTD, own, target_params, config, loss, batch, d2t)
        return jnp.einsum("ubt,ubt,u->", loss_UBT, valid_UBT[:, :, :-1], weight_U)

    (value, sums), grads = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))(h_UBTD, own)
    expected, expected_grads = jax.jit(jax.value_and_grad(definition, (0, 1)))(h_UBTD, own)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_close_trees(grads, expected_grads)
    assert sums["rows"].tolist() == [10, 7][: loss.num_steps]
    assert sums["accept_rows"].shape == (loss.num_steps, 20)


@pytest.mark.slow
@CASES
def test_loss_and_gradients_equal_the_definition(form, d2t, fields):
    """F9: also, no gradient reaches the target."""
    config, draft_params, target_params, loss, batch = setup(form, d2t, **fields)
    counts = count_rows(batch.mask, batch.segment_ids, loss.num_steps)
    (value, _), (grads, target_grads) = loss_and_grads(draft_params, target_params, config, loss, batch, counts, d2t)
    expected = jax.jit(jax.value_and_grad(lambda p: reference(p, target_params, config, loss, batch, d2t)))
    expected_value, expected_grads = expected(draft_params)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert_close_trees(grads, expected_grads)
    assert all(not np.any(g) for g in jax.tree.leaves(target_grads))


def test_micro_batches_add_up_to_their_union():
    """The denominator is the number of rows of the optimizer step. F9: no gradient reaches the target."""
    config, draft_params, target_params, loss, batch = setup("eagle", None, num_steps=2, chunk_rows=3)
    halves = [batch.replace(mask=MASK & (jnp.arange(2)[:, None] == i)) for i in range(2)]
    stacked = jnp.stack([half.mask for half in halves])
    counts = count_rows(stacked, jnp.stack([SEGMENTS, SEGMENTS]), loss.num_steps)
    assert counts.tolist() == [10, 7]
    args = (draft_params, target_params, config, loss)
    (whole, sums), (grads, target_grads) = loss_and_grads(*args, batch, counts, None)
    by_definition = jax.jit(lambda p: reference(p, target_params, config, loss, batch, None))(draft_params)
    np.testing.assert_allclose(whole, by_definition, rtol=1e-5)
    assert sums["accept_rows"].shape == (2, 2, 10)
    assert all(not np.any(g) for g in jax.tree.leaves(target_grads))
    parts = [loss_and_grads(*args, half, counts, None) for half in halves]
    np.testing.assert_allclose(whole, sum(value for (value, _), _ in parts), rtol=1e-6)
    summed = jax.tree.map(jnp.add, *(g for _, (g, _) in parts))
    for got, want in zip(jax.tree.leaves(summed), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_batch_without_supervised_rows_has_no_loss_and_no_gradient():
    config, draft_params, target_params, loss, batch = setup("eagle", None, num_steps=2, chunk_rows=3)
    batch = batch.replace(mask=jnp.zeros_like(MASK))
    (value, sums), (grads, _) = loss_and_grads(draft_params, target_params, config, loss, batch, jnp.zeros(2), None)
    assert float(value) == 0.0 and float(sums["rows"].sum()) == 0.0
    assert all(not np.any(g) for g in jax.tree.leaves(grads))


def test_recipes():
    assert loss_preset("eagle") == LossConfig()
    assert loss_preset("hass", temperature=0.9) == LossConfig(num_steps=3, temperature=0.9)
    with pytest.raises(ValueError, match="eagle, hass"):
        loss_preset("medusa")
    with pytest.raises(ValueError, match="soft_ce, tv"):
        LossConfig(logit_loss="kl")
    config, draft_params, target_params = make("eagle3")
    batch = make_batch(config)
    with pytest.raises(ValueError, match=r"feature_weight 1\.0"):
        draft_loss(draft_params, target_params, config, LossConfig(), batch, jnp.ones(1))
