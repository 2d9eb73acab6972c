import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.drafter import laws

P = np.array([0.5, 0.3, 0.15, 0.05])
Q = np.array([0.2, 0.45, 0.05, 0.3])


def log_accept(p, q, outside=0.0):
    labels = jnp.arange(len(q))
    log_p, log_q = (jnp.log(jnp.broadcast_to(jnp.asarray(x, jnp.float32), (len(q), len(q)))) for x in (p, q))
    return np.asarray(laws.log_accept(log_p, log_q, jnp.full(len(q), outside), labels))


def both_draw(p, q):
    """P(both draw x), by the formula of the paper."""
    return np.array([1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))])


def test_acceptance_of_the_drawn_token_averages_to_the_coupling_probability():
    accept = np.exp(log_accept(P, Q))
    np.testing.assert_allclose(P * accept, both_draw(P, Q), rtol=1e-5)
    noise = np.random.default_rng(0).gumbel(size=(200_000, 4))
    drawn, drafted = (np.argmax(np.log(x) + noise, axis=1) for x in (P, Q))
    assert abs(np.mean(drawn == drafted) - np.sum(P * accept)) < 0.005
    for x in range(4):
        assert abs(np.mean(drafted[drawn == x] == x) - accept[x]) < 0.02


def test_acceptance_with_ids_that_the_drafter_cannot_propose():
    """The target has a fifth of its mass outside the draft vocabulary."""
    p, q = np.array([0.5, 0.2, 0.1, 0.2]), np.array([0.3, 0.4, 0.3, 1e-30])
    np.testing.assert_allclose(np.exp(log_accept(p[:3], q[:3], 0.2)), both_draw(p, q)[:3] / p[:3], rtol=1e-5)


@pytest.mark.parametrize("kind", laws.LOSSES)
def test_every_loss_is_least_and_flat_at_the_target(kind):
    log_p = jnp.log(jnp.asarray(P, jnp.float32))

    @jax.jit
    def loss(logits):
        rows = [laws.row_loss(kind, log_p, jax.nn.log_softmax(logits), jnp.float32(0), jnp.int32(x)) for x in range(4)]
        return jnp.dot(jnp.stack(rows), jnp.asarray(P, jnp.float32))  # the drawn token follows p

    at_target, at_q = loss(log_p), loss(jnp.log(jnp.asarray(Q, jnp.float32)))
    expected = {"soft_ce": -(P * np.log(P)).sum()}.get(kind, 0.0)
    np.testing.assert_allclose(at_target, expected, atol=1e-5)
    assert float(at_q) > float(at_target) + 0.1
    slope = jax.jit(jax.grad(loss))(log_p + jnp.array([0.1, -0.1, 0.05, 0.0]))
    assert float(jnp.dot(slope, jnp.array([0.1, -0.1, 0.05, 0.0]))) > 0


def test_values_of_the_losses():
    log_p, log_q = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (P, Q))
    overlap = 0.2 + 0.3 + 0.05 + 0.05
    kl = (P * np.log(P / Q)).sum()
    weight = np.exp(-3 * overlap)
    expected = {
        "soft_ce": -(P * np.log(Q)).sum(),
        "tv": 1 - overlap,
        "lk": weight * kl + (1 - weight) * (1 - overlap),
        "log_overlap": -np.log(overlap),
        "coupling": np.log(np.maximum(P, Q * 0.3 / 0.45).sum()),
    }
    for kind, value in expected.items():
        got = laws.row_loss(kind, log_p, log_q, jnp.float32(0), jnp.int32(1))
        np.testing.assert_allclose(got, value, rtol=1e-5, err_msg=kind)
    assert float(laws.row_loss("coupling", log_p, log_q, jnp.float32(0), jnp.int32(-1))) == 0.0


def test_measures():
    log_p, log_q = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (P, Q))
    got = laws.row_measures(log_p, log_q, jnp.float32(0), jnp.int32(1))
    expected = {"top1": 0.0, "top3": 1.0, "overlap": 0.6, "accept": 1 / np.maximum(P, Q * 0.3 / 0.45).sum()}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
    same = laws.row_measures(log_p, log_p, jnp.float32(0), jnp.int32(3))
    assert {name: round(float(x), 5) for name, x in same.items()} == dict.fromkeys(expected, 1.0)
