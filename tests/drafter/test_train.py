import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.drafter.shapes import make, random_inputs
from tlt_jax.drafter.buffer import BufferConfig, DataBuffer
from tlt_jax.drafter.config import LossConfig
from tlt_jax.drafter.loss import DraftBatch
from tlt_jax.drafter.packing import BatchConfig, WindowConfig, cut_windows, make_batches
from tlt_jax.drafter.train import DraftOptimConfig, expected_rounds, make_draft_trainer
from tlt_jax.drafter.unroll import valid_rows
from tlt_jax.models import transformer
from tlt_jax.sharding import MeshConfig, make_mesh
from tlt_jax.types import FeatureTrace


@jax.jit
def sample(target_params, tokens, key):
    """32 tokens after each prompt from the target at temperature 1 (no cache: the sequences are short), and their
    features."""
    config = make()[0].target
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def body(t, tokens):
        hidden = transformer.forward(target_params, config, tokens, positions).hidden[:, t]
        drawn = jax.random.categorical(
            jax.random.fold_in(key, t), transformer.compute_logits(target_params, config, hidden)
        )
        return tokens.at[:, t + 1].set(drawn)

    tokens = jax.lax.fori_loop(3, tokens.shape[1] - 1, body, tokens)
    return tokens, transformer.forward(target_params, config, tokens, positions).hidden


def make_batches_of(target_params, num_sequences=16, seed=0):
    """[A,B,T] batches of the target's own responses to random prompts of 4 tokens."""
    prompts = np.random.default_rng(seed).integers(0, 96, (num_sequences, 36)).astype(np.int32)
    tokens, features = (np.asarray(x) for x in sample(target_params, jnp.asarray(prompts), jax.random.key(seed)))
    traces = [
        FeatureTrace(request_id=i, token_ids=tokens[i], prompt_len=4, features=features[i, :-1].astype(jnp.bfloat16))
        for i in range(num_sequences)
    ]
    windows = [w for t in traces for w in cut_windows(t, WindowConfig(row_len=72, context_len=4))]
    return list(make_batches(windows, 2, num_sequences // 4, 72))


LOSS = LossConfig(logit_weight=1.0, chunk_rows=64)


def accept_len(metrics):
    return float(metrics["committed"] / metrics["rounds"])


def test_a_drafter_learns_its_target_and_only_the_drafter_changes():
    """Top-1 agreement and the accept length of a chain rise in 100 steps; the target's parameters stay to the bit."""
    config, draft_params, target_params = make()
    before = jax.tree.map(np.array, target_params)
    optim = DraftOptimConfig(learning_rate=3e-3, warmup_steps=5, total_steps=100, feature_noise=0.01)
    trainer = make_draft_trainer(config, LOSS, optim, eval_steps=2)
    (batch,) = make_batches_of(target_params)
    (held_out,) = make_batches_of(target_params, seed=1)
    state = trainer.init(draft_params)
    first = trainer.evaluate(state.params, target_params, held_out)
    for _ in range(100):
        state, metrics = trainer.step(state, target_params, batch)
    last = trainer.evaluate(state.params, target_params, held_out)
    assert int(state.step) == 100 and float(metrics["is_applied"]) == 1.0
    assert float(last["top1"][0]) > float(first["top1"][0]) + 0.2
    assert accept_len(last) > accept_len(first) + 0.2
    assert metrics["top1"].shape == (1,) and last["top1"].shape == (2,)
    assert float(last["accept"][0]) <= float(last["overlap"][0]) + 0.03  # no coupling beats the overlap
    for got, want in zip(jax.tree.leaves(target_params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got, want)
    assert np.any(draft_params["fc"]["weight"])  # not donated


def test_checkpointed_state_holds_trainable_parameters_only():
    config, _, target_params = make()
    shapes = make_draft_trainer(config, LOSS, DraftOptimConfig()).shapes
    frozen = {leaf.shape for leaf in jax.tree.leaves({k: target_params[k] for k in ("embed", "head")})}
    assert frozen == {(96, 32)}
    assert not any(leaf.shape in frozen for leaf in jax.tree.leaves(shapes))
    assert set(shapes.params) == {"fc", "layer"}


def make_batch(config, num_micro, num_rows, num_tokens=8):
    features, tokens = random_inputs(config, num_micro * num_rows, num_tokens)
    mask = np.random.default_rng(0).random(tokens.shape) < 0.6
    mask[:, -1] = False
    batch = DraftBatch(
        features=features,
        tokens=tokens,
        positions=np.broadcast_to(np.arange(num_tokens, dtype=np.int32), tokens.shape),
        segment_ids=np.ones(tokens.shape, np.int32),
        mask=mask,
    )
    return jax.tree.map(lambda x: np.array(x).reshape(num_micro, num_rows, *x.shape[1:]), batch)


SMALL = (LossConfig(logit_weight=1.0, chunk_rows=5), DraftOptimConfig(learning_rate=1e-3))


@functools.cache
def small_trainer():
    return make_draft_trainer(make()[0], *SMALL)


def step_from_start(trainer, batch):
    _, draft_params, target_params = make()
    return trainer.step(trainer.init(draft_params), target_params, batch)


def assert_same_step(got, want):
    (state, metrics), (want_state, want_metrics) = got, want
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(want_state.params), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)  # Adam's first step makes 1e-3 of any gradient, however small


def test_step_does_not_depend_on_how_it_is_cut():
    """Rows of unlike length in other micro-batches give the same step."""
    config = make()[0]
    batch = make_batch(config, 2, 2)
    batch.mask[0, 1] = False
    order = np.array([0, 3, 1, 2])
    mixed = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:])[order].reshape(x.shape), batch)
    assert mixed.mask.sum((1, 2)).tolist() != batch.mask.sum((1, 2)).tolist()
    assert_same_step(step_from_start(small_trainer(), mixed), step_from_start(small_trainer(), batch))


@pytest.mark.slow
def test_step_does_not_depend_on_how_it_is_sharded():
    config = make()[0]
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])
    batch = make_batch(config, 2, 2)
    sharded = step_from_start(make_draft_trainer(config, *SMALL, mesh=mesh), batch)
    assert sharded[0].params["layer"]["attn"]["q"]["weight"].sharding.spec[0] == "tensor"
    assert_same_step(sharded, step_from_start(small_trainer(), batch))


def test_a_bad_gradient_changes_nothing():
    config, draft_params, _ = make()
    batch = make_batch(config, 2, 2)
    batch = batch.replace(features=np.where(batch.positions[..., None] == 3, np.inf, batch.features))
    state, metrics = step_from_start(small_trainer(), batch)
    assert float(metrics["is_applied"]) == 0.0 and int(state.step) == 0
    np.testing.assert_array_equal(state.params["fc"]["weight"], draft_params["fc"]["weight"])


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="above warmup_steps"):
        DraftOptimConfig(warmup_steps=10, total_steps=5)


def test_a_batch_comes_from_the_buffer_in_one_fixed_shape():
    """None where there is nothing to train on; the tokens of a step are counted, for merges to weigh by."""
    config, draft_params, target_params = make()
    shape = BatchConfig(row_len=8, context_len=2, num_rows=2, num_micro=2)
    trainer = make_draft_trainer(config, *SMALL, batch=shape)
    buffer, rng = DataBuffer(BufferConfig()), np.random.default_rng(0)
    assert trainer.make_batch(buffer, rng) is None
    tokens = rng.integers(0, 96, 9).astype(np.int32)
    features = rng.standard_normal((8, 32)).astype(jnp.bfloat16)
    for i in range(3):
        buffer.add(FeatureTrace(request_id=i, token_ids=tokens, prompt_len=4, features=features))
        batch = trainer.make_batch(buffer, rng)
        assert batch.tokens.shape == (2, 2, 8) and batch.features.shape == (2, 2, 8, 32)
        assert batch.mask.sum() == 4 * (i + 1)
    state, _ = trainer.step(trainer.init(draft_params), target_params, batch)
    assert (int(state.step), int(state.tokens)) == (1, 12)


def simulate_rounds(accept_UT, mask_T, segment_T, rng):
    """Rounds that chains need, drawn draft by draft."""
    rounds, t = 0, 0
    while t < len(mask_T):
        if not mask_T[t]:
            t += 1
            continue
        rounds += 1
        k, segment = 0, segment_T[t]
        while k < len(accept_UT) and t + k < len(mask_T) and rng.random() < accept_UT[k, t + k]:
            k += 1
        t += k + 1
        while t < len(mask_T) and segment_T[t - 1] == segment and segment_T[t] != segment and not mask_T[t]:
            t += 1
    return rounds


def test_expected_rounds_are_the_mean_of_simulated_ones():
    rng = np.random.default_rng(0)
    segments = np.array([[1] * 9 + [2] * 7 + [0] * 2])
    mask = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]], bool)
    accept = rng.uniform(0.3, 1.0, (3, 1, 18)) * np.asarray(valid_rows(mask, segments, 3))
    got = expected_rounds(jnp.asarray(accept), jnp.asarray(mask), jnp.asarray(segments))
    counts = [simulate_rounds(accept[:, 0], mask[0], segments[0], rng) for _ in range(20_000)]
    np.testing.assert_allclose(got, np.mean(counts), atol=4 * np.std(counts) / 20_000**0.5)
    sure = expected_rounds(jnp.asarray(valid_rows(mask, segments, 3), jnp.float32), jnp.asarray(mask), segments)
    assert float(sure) == 4.0  # six rows in runs of four, five in runs of four
    assert float(expected_rounds(jnp.zeros((3, 1, 18)), jnp.asarray(mask), segments)) == 11.0
