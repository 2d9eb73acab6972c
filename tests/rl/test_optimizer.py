"""Schedules by value, decay mask, clipping, and gradients that are not finite."""

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.rl.optimizer import LearnerState, OptimizerConfig, apply_gradients, make_optimizer, make_schedule

PARAMS = {"matrix": jnp.ones((2, 2)), "scale": jnp.ones(2)}


def _rates(config, steps):
    schedule = make_schedule(config)
    return [float(schedule(step)) for step in steps]


def test_schedules_by_value():
    constant = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    np.testing.assert_allclose(_rates(constant, [0, 1, 3, 4, 100]), [0.25, 0.5, 1, 1, 1])
    linear = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2, total_steps=12, end_factor=0.5)
    np.testing.assert_allclose(_rates(linear, [0, 1, 2, 7, 12, 20]), [0.5, 1, 1, 0.75, 0.5, 0.5])
    cosine = OptimizerConfig(learning_rate=2.0, schedule="cosine", total_steps=10, end_factor=0.1)
    np.testing.assert_allclose(_rates(cosine, [0, 5, 10]), [2.0, 1.1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(_rates(OptimizerConfig(learning_rate=1.0, warmup_steps=1), [0, 1]), [1, 1])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"schedule": "step"}, "schedule"),
        ({"schedule": "cosine"}, "total_steps"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"b2": 1.0}, "b2"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
)
def test_bad_fields_name_themselves(fields, name):
    with pytest.raises(ValueError, match=f"optimizer.{name}: got"):
        OptimizerConfig(**fields)


def _apply(config, grads, state=None):
    optimizer = make_optimizer(config)
    state = state or LearnerState(params=PARAMS, opt_state=optimizer.init(PARAMS), step=jnp.int32(0))
    return apply_gradients(optimizer, state, grads)


def test_weight_decay_leaves_vectors_alone():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    state, _ = _apply(config, {"matrix": jnp.zeros((2, 2)), "scale": jnp.zeros(2)})
    np.testing.assert_allclose(state.params["matrix"], 0.95, rtol=1e-6)
    np.testing.assert_array_equal(state.params["scale"], 1.0)


def test_gradient_norm_is_reported_before_clipping():
    grads = {"matrix": jnp.full((2, 2), 3.0), "scale": jnp.zeros(2)}
    clipped, info = _apply(OptimizerConfig(learning_rate=0.1, max_grad_norm=1.0, eps=1.0), grads)
    free, _ = _apply(OptimizerConfig(learning_rate=0.1, max_grad_norm=0.0, eps=1.0), grads)
    assert float(info["grad_norm"]) == 6.0 and float(info["is_applied"]) == 1.0
    np.testing.assert_allclose(clipped.params["matrix"], 1 - 0.1 * 0.5 / 1.5, rtol=1e-5)
    np.testing.assert_allclose(free.params["matrix"], 1 - 0.1 * 3 / 4, rtol=1e-5)
    assert int(clipped.step) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradient_that_is_not_finite_changes_nothing(bad):
    config = OptimizerConfig(learning_rate=0.1)
    good = {"matrix": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    before, _ = _apply(config, good)
    after, info = _apply(config, {"matrix": jnp.ones((2, 2)).at[0, 0].set(bad), "scale": jnp.ones(2)}, before)
    assert float(info["is_applied"]) == 0.0 and int(after.step) == 1
    np.testing.assert_array_equal(after.params["matrix"], before.params["matrix"])
    resumed, _ = _apply(config, good, after)
    expected, _ = _apply(config, good, before)
    np.testing.assert_array_equal(resumed.params["matrix"], expected.params["matrix"])
