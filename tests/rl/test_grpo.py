"""The policy loss by value: aggregation, clips, KL estimators, gradients at the edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.rl.algorithms import AlgorithmConfig, preset
from tlt_jax.rl.grpo import TokenTerms, kl_estimate, log_ratio, policy_loss, sequence_log_ratio


def _terms(logprobs, **fields):
    logprobs = jnp.asarray(logprobs, jnp.float32)
    shape = logprobs.shape
    base = {
        "logprobs": logprobs,
        "entropies": jnp.zeros(shape),
        "old_logprobs": jax.lax.stop_gradient(logprobs),
        "behaviour_logprobs": jax.lax.stop_gradient(logprobs),
        "ref_logprobs": None,
        "advantages": jnp.ones(shape),
        "weights": jnp.full(shape, 1.0 / logprobs.size),
        "mask": jnp.ones(shape, bool),
        "segments": jnp.zeros(shape, jnp.int32),
    }
    fields = {k: jnp.asarray(v, jnp.float32) if isinstance(v, list) else v for k, v in fields.items()}
    return TokenTerms(**{**base, **fields})


def _loss(logprobs, algo, **fields):
    return policy_loss(_terms(logprobs, **fields), algo)[0]


@pytest.mark.parametrize(
    ("old", "advantage", "algo", "expected"),
    [
        (-1.0, 1.0, {}, -1.0),
        (-2.0, 1.0, {}, -1.2),  # ratio e, clipped above
        (-2.0, 1.0, {"clip_high": 0.28}, -1.28),
        (-0.5, 1.0, {}, -np.exp(-0.5)),  # pessimistic: a low ratio is not clipped for A > 0
        (-0.5, -1.0, {}, 0.8),  # clipped below
        (-2.0, -1.0, {}, np.e),  # pessimistic: a high ratio is not clipped for A < 0
        (-2.0, -1.0, {"dual_clip": 2.0}, 2.0),
        (-2.0, -1.0, {"dual_clip": 3.0}, np.e),
    ],
)
def test_clips_by_value(old, advantage, algo, expected):
    loss = _loss([[-1.0]], AlgorithmConfig(**algo), old_logprobs=[[old]], advantages=[[advantage]])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_clip_metrics_count_active_clips():
    algo = AlgorithmConfig(dual_clip=2.0)
    terms = _terms([[-1.0, -1.0, -1.0]], old_logprobs=[[-2.0, -2.0, -1.0]], advantages=[[1.0, -1.0, 1.0]])
    _, metrics = policy_loss(terms, algo)
    assert (float(metrics["sum/clip"]), float(metrics["sum/dual_clip"])) == (1.0, 1.0)
    np.testing.assert_allclose(metrics["max/ratio"], np.e, rtol=1e-6)
    assert float(metrics["sum/tokens"]) == 3.0


def test_on_policy_ratio_is_exactly_one():
    """B25: with old = stop_gradient(new) the ratio is 1 to the bit and the gradient is that of REINFORCE."""
    logprobs = jnp.asarray(np.random.default_rng(0).normal(-3, 2, (4, 5)), jnp.float32)

    def loss(x, algo):
        return policy_loss(_terms(x, advantages=jnp.full((4, 5), 2.0)), algo)

    for name in ("grpo", "gspo"):
        algo = preset(name, kl_coef=0.0)
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(logprobs, algo)
        assert float(metrics["sum/ratio"]) == 20.0 and float(metrics["max/ratio"]) == 1.0
        np.testing.assert_allclose(value, -2.0, rtol=1e-6)
        np.testing.assert_allclose(grads, np.full((4, 5), -2.0 / 20), rtol=1e-6)


def test_log_ratio_is_bounded_before_exp():
    """B8: a log-ratio of 200 gives a finite value and gradient 0, not inf * 0."""

    def k3(policy):
        return kl_estimate(policy, jnp.float32(0.0), jnp.bool_(True), "k3")

    value, grad = jax.value_and_grad(k3)(jnp.float32(-200.0))
    assert (float(value), float(grad)) == (10.0, 0.0)

    def ratio(new):
        return jnp.exp(log_ratio(new, jnp.float32(-200.0), jnp.bool_(True)))

    value, grad = jax.value_and_grad(ratio)(jnp.float32(0.0))
    np.testing.assert_allclose(value, np.exp(20.0), rtol=1e-6)
    assert float(grad) == 0.0


def test_policy_loss_has_finite_gradients_at_extreme_ratios():
    """B8: the whole loss stays finite where the policies have drifted apart without bound."""
    for old, advantage in ((-300.0, 1.0), (-300.0, -1.0), (300.0, 1.0), (300.0, -1.0)):
        grad = jax.grad(
            lambda x, o=old, a=advantage: _loss(
                x, preset("grpo"), old_logprobs=[[o]], advantages=[[a]], ref_logprobs=[[o]]
            )
        )(jnp.array([[-1.0]]))
        assert np.isfinite(grad).all()


@pytest.mark.parametrize(
    ("policy", "ref", "estimator", "expected"),
    [
        (-1.0, -2.0, "k3", 0.36788),
        (-2.0, -1.0, "k3", 0.71828),
        (-1.0, -1.0, "k3", 0.0),
        (-1.0, -2.0, "k1", 1.0),
        (-1.0, -2.0, "k2", 0.5),
    ],
)
def test_kl_estimators_by_value(policy, ref, estimator, expected):
    """B9: estimator and sign: k3 = exp(ref - policy) - (ref - policy) - 1."""
    value = kl_estimate(jnp.float32(policy), jnp.float32(ref), jnp.bool_(True), estimator)
    np.testing.assert_allclose(value, expected, atol=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_of_equal_policies_does_not_pull(estimator):
    """B9: equal log-probs give KL 0 with gradient 0."""
    grad = jax.grad(lambda x: kl_estimate(x, jnp.float32(-1.0), jnp.bool_(True), estimator))(jnp.float32(-1.0))
    assert float(grad) == 0.0


def test_k3_is_unbiased_and_not_negative():
    """B9: k1 and k3 agree in expectation with the exact KL."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    exact = float(np.sum(p * np.log(p / q)))
    args = (jnp.asarray(np.log(p), jnp.float32), jnp.asarray(np.log(q), jnp.float32), jnp.ones(3, bool))
    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(np.sum(p * np.asarray(kl_estimate(*args, estimator))), exact, rtol=1e-5)
    assert (np.asarray(kl_estimate(*args, "k3")) >= 0).all()


def test_masks_must_be_bool():
    """B11: a float mask is refused, so that swapped arguments cannot train quietly."""
    with pytest.raises(ValueError, match="mask: got float32, expected bool"):
        _loss([[-1.0]], preset("grpo"), mask=jnp.ones((1, 1)))


def test_shapes_must_agree():
    """B11: a wrong argument is named."""
    with pytest.raises(ValueError, match=r"advantages: got shape \(2, 1\)"):
        _loss([[-1.0]], preset("grpo"), advantages=[[1.0], [1.0]])


def test_log_probs_must_be_f32():
    """B19: bf16 log-probs are refused."""
    with pytest.raises(ValueError, match="logprobs: got bfloat16"):
        policy_loss(_terms([[-1.0]]).replace(logprobs=jnp.zeros((1, 1), jnp.bfloat16)), preset("grpo"))


def test_masked_slots_are_safe_in_value_and_gradient():
    """B22: a padded slot with an old log-prob of -200 gives gradient 0, not NaN."""
    mask = jnp.array([True, False])

    def total(x):
        return jnp.sum(jnp.exp(log_ratio(x, jnp.array([0.0, -200.0]), mask)) * mask)

    np.testing.assert_array_equal(jax.grad(total)(jnp.zeros(2)), [1.0, 0.0])
    grad = jax.grad(
        lambda x: _loss(
            x, preset("grpo"), old_logprobs=[[0.0, -jnp.inf]], mask=mask[None], ref_logprobs=[[0.0, jnp.nan]]
        )
    )(jnp.zeros((1, 2)))
    np.testing.assert_allclose(grad, [[-0.5, 0.0]])


def test_kl_shares_the_weights_of_the_policy_term():
    """B7: KL and policy terms have one normalisation."""
    weights = [[0.5, 0.1]]
    loss = _loss(
        [[-1.0, -1.0]],
        preset("grpo", kl_coef=0.1),
        advantages=[[0.0, 0.0]],
        weights=weights,
        ref_logprobs=[[-2.0, -2.0]],
    )
    np.testing.assert_allclose(loss, 0.1 * (0.5 + 0.1) * 0.36788, rtol=1e-4)


def test_no_signal_and_no_kl_gives_gradient_exactly_zero():
    """B18: advantage 0 with kl_coef 0 pulls on nothing; with KL it does."""
    args = {"advantages": [[0.0, 0.0]], "old_logprobs": [[-1.0, -3.0]], "ref_logprobs": [[-2.0, -1.0]]}
    logprobs = jnp.array([[-1.0, -2.0]])
    grad = jax.grad(lambda x: _loss(x, preset("grpo", kl_coef=0.0), **args))(logprobs)
    np.testing.assert_array_equal(grad, [[0.0, 0.0]])
    assert (np.abs(jax.grad(lambda x: _loss(x, preset("grpo"), **args))(logprobs)) > 0).all()


def test_truncated_importance_weights():
    """B2: tokens are weighed by min(learner / rollout, cap); the weight carries no gradient."""
    behaviour = [[-1.0 - np.log(3.0), -1.0 + np.log(2.0)]]  # learner / rollout is 3 and 0.5

    def loss(x):
        return _loss(x, AlgorithmConfig(tis_cap=2.0), old_logprobs=[[-1.0, -1.0]], behaviour_logprobs=behaviour)

    value, grad = jax.value_and_grad(loss)(jnp.array([[-1.0, -1.0]]))
    np.testing.assert_allclose(value, -(2.0 + 0.5) / 2, rtol=1e-6)
    np.testing.assert_allclose(grad, [[-1.0, -0.25]], rtol=1e-6)


def test_entropy_bonus_lowers_the_loss():
    loss = _loss([[-1.0]], AlgorithmConfig(entropy_coef=0.1), advantages=[[0.0]], entropies=[[2.0]])
    np.testing.assert_allclose(loss, -0.2, rtol=1e-6)


def test_sequence_ratio_is_the_geometric_mean_of_each_response():
    """GSPO: two responses packed in a row keep their own ratios; padding takes no part."""
    ratios = jnp.array([[0.2, 0.4, -0.6, 9.0]])
    mask = jnp.array([[True, True, True, False]])
    segments = jnp.array([[0, 0, 1, 0]])
    np.testing.assert_allclose(sequence_log_ratio(ratios, mask, segments)[0, :3], [0.3, 0.3, -0.6], rtol=1e-6)


def test_gspo_loss_by_value():
    """GSPO: the clipped sequence ratio, and a gradient shared by the response's tokens."""
    algo = preset("gspo", clip_low=0.2, clip_high=0.2)

    def loss(x, old):
        return _loss(x, algo, old_logprobs=old)

    value, grad = jax.value_and_grad(loss)(jnp.array([[-1.0, -1.0]]), [[-1.3, -0.9]])  # mean log-ratio 0.1
    np.testing.assert_allclose(value, -np.exp(0.1), rtol=1e-6)
    np.testing.assert_allclose(grad, np.full((1, 2), -np.exp(0.1) / 2), rtol=1e-6)
    np.testing.assert_allclose(loss(jnp.array([[-1.0, -1.0]]), [[-2.0, -2.0]]), -1.2, rtol=1e-6)
