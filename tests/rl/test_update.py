"""The learner: exact under every cut and sharding, and it learns."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl import tiny
from tlt_jax.models.transformer import compute_logits, forward
from tlt_jax.rl.algorithms import PRESETS, AlgorithmConfig, preset
from tlt_jax.rl.batch import PackConfig, assign_advantages, make_batch, row_weights, split_minibatches
from tlt_jax.rl.optimizer import OptimizerConfig
from tlt_jax.rl.packing import empty_micro_batch, make_micro_batches
from tlt_jax.rl.steps import LearnerConfig
from tlt_jax.rl.update import make_learner, place
from tlt_jax.sharding import MeshConfig, make_mesh
from tlt_jax.types import Completion, SamplingParams

OPTIM = OptimizerConfig(learning_rate=3e-3, eps=1e-6)
PLAIN = AlgorithmConfig()
TWO_PASSES = preset("grpo", num_iterations=2)


def _learner(algo=PLAIN, config=tiny.LEARNER, axes=None):
    return _cached_learner(algo, config, axes)


@functools.cache  # tests share compiled programs
def _cached_learner(algo, config, axes):
    mesh = None
    if axes is not None:
        mesh = make_mesh(MeshConfig(data=axes[0], fsdp=axes[1], tensor=axes[2]), jax.devices()[: math.prod(axes)])
    return make_learner(tiny.CONFIG, algo, OPTIM, config, mesh)


def _gradient(learner, batch, micros=None):
    """Gradient and loss of a batch, summed over its micro-batches."""
    state = learner.init(tiny.params())
    grads, sums = learner.steps.zeros()
    for micro in micros or learner.micro_batches(batch, np.flatnonzero(batch.is_trained)):
        args = (micro, micro.behaviour_logprobs, None, np.bool_(False), np.float32(batch.temperature))
        grads, sums = learner.steps.accumulate(state.params, grads, sums, *args)
    return jax.device_get(grads), float(sums["sum/loss"])


def _assert_close(got, expected, rtol):
    scale = max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=rtol * scale)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_gradient_does_not_depend_on_micro_batches(aggregation):
    """B3, E2: one micro-batch, several, and ones of weight 0 beside them give one loss and one gradient."""
    algo = AlgorithmConfig(aggregation=aggregation)
    batch = tiny.batch(algo, rewards=[0, 1, 3, 0, 5, 1], max_len=30)
    weights = row_weights(batch.response_lens, algo, batch.max_tokens)

    def cut(config):
        return [place(micro, None) for micro in make_micro_batches(batch, np.arange(6), weights, config.pack)]

    one = LearnerConfig(pack=PackConfig(micro_batch_tokens=256, min_width=64))
    several = cut(tiny.LEARNER)
    empty = [place(empty_micro_batch(*several[0].tokens.shape), None)] * 2
    assert len(cut(one)) == 1 and len(several) > 1
    grads, loss = _gradient(_learner(config=one), batch, cut(one))
    for micros in (several, [*empty, *several]):
        other_grads, other_loss = _gradient(_learner(), batch, micros)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
        _assert_close(other_grads, grads, 1e-5)


@pytest.mark.parametrize("axes", [(2, 1, 1), (1, 2, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_gradient_does_not_depend_on_the_mesh(axes):
    """B4: 2, 4 and 8 devices give the loss and gradient of one, though shards hold unequal numbers of tokens."""
    batch = tiny.batch(PLAIN, max_len=30)
    expected, loss = _gradient(_learner(), batch)
    grads, sharded_loss = _gradient(_learner(axes=axes), batch)
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    _assert_close(grads, expected, 1e-5)


def test_sharded_update_equals_one_device():
    """B4: a whole update with KL, old log-probs and AdamW on 8 devices; state and log-probs come back equal."""
    batch, ref = tiny.batch(TWO_PASSES, max_len=30), tiny.params(seed=1)
    results = []
    for axes in (None, (2, 2, 2)):
        learner = _learner(TWO_PASSES, axes=axes)
        state, metrics = learner.update(learner.init(tiny.params()), batch, learner.init(ref).params)
        results.append((jax.device_get(state.params), metrics, learner.logprobs(state.params, batch)))
    shapes = learner.steps.state_shapes
    assert jax.tree.map(lambda x: x.sharding.spec, state) == jax.tree.map(lambda x: x.sharding.spec, shapes)
    _assert_close(results[1][0], results[0][0], 1e-5)
    for name in ("rl/loss", "rl/kl", "rl/grad_norm", "rl/valid_tokens", "rl/logprob_gap"):
        np.testing.assert_allclose(results[1][1][name], results[0][1][name], rtol=1e-4, atol=1e-6)
    for a, b in zip(results[0][2], results[1][2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("dtype", ["", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_first_update_is_on_policy_to_the_bit(dtype):
    """B25: one iteration and one mini-batch: every ratio is exactly 1 and nothing is clipped, in bf16 too."""
    learner = _learner(config=dataclasses.replace(tiny.LEARNER, compute_dtype=dtype))
    num_scored = learner.steps.trace_counts["score"]
    _, metrics = learner.update(learner.init(tiny.params()), tiny.batch(PLAIN))
    assert (metrics["rl/ratio_mean"], metrics["rl/ratio_max"], metrics["rl/clip_frac"]) == (1.0, 1.0, 0.0)
    assert learner.steps.trace_counts["score"] == num_scored, "no pass for old log-probs"


def test_rollout_at_the_learners_temperature_has_no_gap():
    """B1, B15: log-probs recorded at temperature 0.6 equal those recomputed; at temperature 1 they do not."""
    learner = _learner()
    batch = tiny.batch(PLAIN, temperature=0.6)
    batch = dataclasses.replace(batch, behaviour_logprobs=tuple(learner.logprobs(tiny.params(), batch)))
    _, metrics = learner.update(learner.init(tiny.params()), batch)
    assert metrics["rl/logprob_gap"] < 1e-6
    _, metrics = learner.update(learner.init(tiny.params()), dataclasses.replace(batch, temperature=1.0))
    assert metrics["rl/logprob_gap"] > 0.1


def test_rows_without_signal_leave_the_loss_of_the_others_unchanged():
    """B18: an equal group moves nothing; dropped, it is as if it had never been there."""
    rewards = [0, 1, 1, 0, 5, 5]
    dropped = _gradient(_learner(), tiny.batch(AlgorithmConfig(zero_std="drop"), rewards=rewards))
    kept = _gradient(_learner(), tiny.batch(PLAIN, rewards=rewards))
    batch = make_batch(tiny.completions()[:4], SamplingParams(max_tokens=11))
    alone = _gradient(_learner(), assign_advantages(batch, rewards[:4], 2, PLAIN)[0])
    np.testing.assert_allclose(dropped[1], alone[1], rtol=1e-6)
    _assert_close(dropped[0], alone[0], 1e-6)
    np.testing.assert_allclose(kept[1], alone[1] * 4 / 6, rtol=1e-5)
    silent = _gradient(_learner(), tiny.batch(PLAIN, rewards=[1] * 6))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(silent[0]))


def test_batch_without_any_row_changes_nothing():
    """B18, E2: every group dropped: no optimizer step, and the metrics say so."""
    learner = _learner()
    batch = tiny.batch(AlgorithmConfig(zero_std="drop"), rewards=[1] * 6)
    state, metrics = learner.update(learner.init(tiny.params()), batch)
    assert (metrics["rl/valid_tokens"], metrics["rl/num_updates"], metrics["rl/micro_batches"]) == (0, 0, 0)
    _assert_close(jax.device_get(state.params), jax.device_get(tiny.params()), 0.0)


_SLOW = ("dapo", "dr_grpo", "grpo", "reinforce_pp")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in sorted(PRESETS)]
)
def test_every_preset_updates(name):
    """Each published algorithm runs two iterations of two mini-batches; only the first step is on policy."""
    algo = preset(name, num_iterations=2, num_minibatches=2)
    learner = _learner(algo)
    batch = tiny.batch(algo, max_len=9)
    state, metrics = learner.update(learner.init(tiny.params()), batch, tiny.params(seed=1))
    assert metrics["rl/num_updates"] == 4 == int(state.step)
    assert metrics["rl/valid_tokens"] == 2 * batch.response_lens[batch.is_trained].sum()
    assert metrics["rl/ratio_max"] > 1.0 and metrics["rl/grad_norm"] > 0.0
    assert (metrics["rl/kl"] > 0.0) == (algo.kl_in == "loss" and algo.kl_coef > 0.0)
    assert all(np.isfinite(value) for value in metrics.values())


def test_update_steps_divide_by_their_own_tokens():
    """B5: the weights of each optimizer step's micro-batches add up to 1, whatever the step."""
    algo = AlgorithmConfig(aggregation="token_mean", num_minibatches=3)
    learner, batch = _learner(algo), tiny.batch(algo)
    for rows in split_minibatches(batch, algo.num_minibatches):
        micros = learner.micro_batches(batch, rows)
        np.testing.assert_allclose(sum(float(micro.weights.sum()) for micro in micros), 1.0, rtol=1e-6)


def test_programs_are_traced_once():
    """H3: updates with other rows, rewards and temperatures trace each program once."""
    learner = _learner(TWO_PASSES)
    state, ref = learner.init(tiny.params()), tiny.params(seed=1)
    for seed in range(5):
        state, _ = learner.update(state, tiny.batch(TWO_PASSES, seed=seed, temperature=0.5 + 0.1 * seed), ref)
    counts = {name: learner.steps.trace_counts[name] for name in ("init", "zeros", "score", "accumulate", "apply")}
    assert counts == {"init": 1, "zeros": 1, "score": 1, "accumulate": 1, "apply": 1}
    assert int(state.step) == 10


def test_bad_gradient_is_skipped_and_counted():
    """A loss that is not finite poisons neither parameters nor moments, and the next update works."""
    learner, good = _learner(), tiny.batch(PLAIN)
    bad = dataclasses.replace(good, advantages=np.full(6, np.nan, np.float32))
    state, metrics = learner.update(learner.init(tiny.params()), bad)
    assert (metrics["rl/skipped_updates"], metrics["rl/num_updates"], int(state.step)) == (1.0, 0.0, 0)
    assert all(np.isfinite(value) for value in metrics.values())
    _assert_close(jax.device_get(state.params), jax.device_get(tiny.params()), 0.0)
    after, metrics = learner.update(state, good)
    expected, _ = learner.update(learner.init(tiny.params()), good)
    assert (metrics["rl/skipped_updates"], int(after.step)) == (0.0, 1)
    _assert_close(jax.device_get(after.params), jax.device_get(expected.params), 0.0)


def test_callers_parameters_survive_the_donated_update():
    learner = _learner()
    mine = jax.tree.map(jnp.array, tiny.params())
    state, _ = learner.update(learner.init(mine), tiny.batch(PLAIN))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
    assert np.any(np.asarray(state.params["embed"]["weight"]) != np.asarray(mine["embed"]["weight"]))


def test_kl_needs_the_reference():
    learner = _learner(TWO_PASSES)
    with pytest.raises(ValueError, match="ref_params: got None"):
        learner.update(learner.init(tiny.params()), tiny.batch(TWO_PASSES))


def test_kl_in_the_reward_is_summed_over_the_response():
    """RLOO: the row's reward loses kl_coef times the sum of log policy - log reference."""
    learner = _learner(preset("rloo", num_iterations=2, num_minibatches=2))
    batch, ref = tiny.batch(PLAIN), tiny.params(seed=1)
    sums = learner.kl_sums(tiny.params(), ref, batch)
    policy, reference = learner.logprobs(tiny.params(), batch), learner.logprobs(ref, batch)
    expected = [np.clip(p - r, -20, 20).sum() for p, r in zip(policy, reference, strict=True)]
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)


def test_grpo_learns_a_toy_reward():
    """60 steps of a tiny policy on 'write token 7': the share of 7s rises from chance to most tokens."""
    P, R, T = 4, 8, 4
    learner = _learner()
    state = learner.init(tiny.params(scale=1.0))
    sampling = SamplingParams(max_tokens=T)
    rewards_by_step = []
    for step in range(60):
        tokens, logprobs = jax.device_get(_sample(state.params, jnp.arange(P).repeat(R), jax.random.key(step), T))
        rows = [
            Completion(
                request_id=i,
                prompt_id=i // R,
                sample=i % R,
                prompt_ids=(i // R,),
                token_ids=tokens[i],
                logprobs=logprobs[i],
                finish_reason="length",
            )
            for i in range(P * R)
        ]
        rewards = (tokens == 7).mean(axis=1)
        batch, _ = assign_advantages(make_batch(rows, sampling), rewards, R, PLAIN)
        state, metrics = learner.update(state, batch)
        assert metrics["rl/logprob_gap_max"] < 1e-4
        rewards_by_step.append(rewards.mean())
    assert np.mean(rewards_by_step[:5]) < 0.15
    assert np.mean(rewards_by_step[-5:]) > 0.6


def _sample(params, prompt_B, key, num_tokens):
    """A plain sampler: one whole forward per token."""
    tokens_BT = jnp.zeros((len(prompt_B), num_tokens + 1), jnp.int32).at[:, 0].set(prompt_B)
    logprobs = []
    for t in range(1, num_tokens + 1):
        tokens_BT, logprob_B = _sample_token(params, tokens_BT, t, jax.random.fold_in(key, t))
        logprobs.append(logprob_B)
    return tokens_BT[:, 1:], jnp.stack(logprobs, axis=1)


@jax.jit
def _sample_token(params, tokens_BT, t, key):
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    hidden_BTD = forward(params, tiny.CONFIG, tokens_BT, positions_BT).hidden
    logp_BV = jax.nn.log_softmax(compute_logits(params, tiny.CONFIG, hidden_BTD[:, t - 1]))
    token_B = jax.random.categorical(key, logp_BV)
    return tokens_BT.at[:, t].set(token_B), jnp.take_along_axis(logp_BV, token_B[:, None], axis=1)[:, 0]
