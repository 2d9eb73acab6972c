"""Supervised steps against a plain cross-entropy and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.rl import tiny
from tlt_jax.models.transformer import compute_logits, forward
from tlt_jax.rl.optimizer import OptimizerConfig, make_optimizer
from tlt_jax.rl.sft import Example, make_supervised_batch, make_supervised_learner

OPTIM = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5)


def _examples(num_rows=7):
    rng = np.random.default_rng(0)
    lens = [(int(rng.integers(1, 9)), int(rng.integers(1, 25))) for _ in range(num_rows)]
    rows = [(rng.integers(0, 37, p).tolist(), rng.integers(0, 37, r).tolist()) for p, r in lens]
    return [Example(prompt_ids=tuple(p), response_ids=tuple(r)) for p, r in rows]


def _cross_entropy(params, examples):
    """Mean over all response tokens, one example a row, right-padded."""
    tokens_BT, mask_BT = np.zeros((len(examples), 32), np.int32), np.zeros((len(examples), 32), bool)
    for row, e in enumerate(examples):
        ids = [*e.prompt_ids, *e.response_ids]
        tokens_BT[row, : len(ids)] = ids
        mask_BT[row, len(e.prompt_ids) : len(ids)] = True
    positions_BT = jnp.broadcast_to(jnp.arange(32), tokens_BT.shape)
    logits_BTV = compute_logits(params, tiny.CONFIG, forward(params, tiny.CONFIG, tokens_BT, positions_BT).hidden)
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV[:, :-1], tokens_BT[:, 1:])
    return jnp.sum(loss_BT * mask_BT[:, 1:]) / mask_BT.sum()


def test_a_step_is_adamw_on_the_mean_cross_entropy_of_response_tokens():
    """Over several packed micro-batches; the caller's parameters survive."""
    params, examples = tiny.params(), _examples()
    learner = make_supervised_learner(tiny.CONFIG, OPTIM, tiny.LEARNER)
    state, metrics = learner.update(learner.init(params), examples)
    loss, grads = jax.jit(lambda p: jax.value_and_grad(_cross_entropy)(p, examples))(params)
    optimizer = make_optimizer(OPTIM)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert metrics["sft/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["sft/grad_norm"] == pytest.approx(float(optax.global_norm(grads)), rel=1e-4)
    assert metrics["sft/tokens"] == sum(len(e.response_ids) for e in examples)
    assert metrics["sft/skipped_updates"] == 0 and metrics["sft/learning_rate"] == pytest.approx(1e-2)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-5),
        state.params,
        optax.apply_updates(params, updates),
    )


def test_bad_examples_are_refused():
    with pytest.raises(ValueError, match="got 3 prompt tokens and 0 response tokens"):
        Example(prompt_ids=(1, 2, 3), response_ids=())
    with pytest.raises(ValueError, match="got none"):
        make_supervised_batch([])
