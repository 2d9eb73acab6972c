"""Windows of training: begin, measure, stop, fail, write; with a trainer that counts, and once with a real one."""

import dataclasses
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.drafter.shapes import make
from tests.drafter.test_train import sample
from tlt_jax.coordinator.messages import WindowEnd
from tlt_jax.coordinator.online import OnlineDrafter
from tlt_jax.coordinator.spot_trainer import Data, SpotConfig, SpotTrainer
from tlt_jax.drafter.buffer import BufferConfig
from tlt_jax.drafter.config import LossConfig
from tlt_jax.drafter.packing import BatchConfig
from tlt_jax.drafter.train import DraftOptimConfig, DraftState, DraftTrainer, make_draft_trainer
from tlt_jax.sharding import Versioned
from tlt_jax.types import FeatureTrace

ROWS = 5  # that a step of the counting trainer is taken on


def counting_trainer(accept_lens=(), fails_at=None, has_data=lambda: True):
    """Each step adds 1 to the weights. Measurements read `accept_lens` out; the step of number `fails_at` raises."""
    measured = iter(accept_lens)
    numbers = itertools.count(1)

    def init(params):
        params = jax.tree.map(jnp.copy, params)
        return DraftState(params=params, opt_state={"m": jnp.zeros(2)}, step=jnp.int32(0), tokens=jnp.int32(0))

    def step(state, target, batch):
        new = jax.tree.map(lambda x: x + 1, state.params)
        jax.tree.map(lambda x: x.delete(), state.params)  # donated
        if next(numbers) == fails_at:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        one = DraftState(params=new, opt_state=state.opt_state, step=state.step + 1, tokens=state.tokens + ROWS)
        return one, {"loss": jnp.float32(2.0), "top1": jnp.full(3, 0.5), "rows": jnp.full(3, ROWS)}

    def make_batch(buffer, rng):
        if buffer.step == -1:  # held out
            return "held out" if accept_lens else None
        return "batch" if has_data() else None

    def evaluate(params, target, batch):
        assert batch == "held out"
        return {"committed": 10.0 * next(measured), "rounds": 10.0}

    shapes = jax.eval_shape(init, {"w": jnp.zeros(2)})
    return DraftTrainer(init=init, step=step, evaluate=evaluate, make_batch=make_batch, shapes=shapes)


def make_spot(trainer, worker=0, directory=None, on_better=lambda params: None, **config):
    data = Data(BufferConfig(), 0.5)
    data.start_step(3)
    data.held_out.start_step(-1)
    engine = types.SimpleNamespace(worker=worker, weights=Versioned({"t": jnp.ones(2)}, 0))
    config = SpotConfig(**{"eval_every": 2, "patience": 2, "min_gain": 0.1} | config)
    return SpotTrainer(engine, trainer, {"w": jnp.zeros(2)}, data, config, directory=directory, on_better=on_better)


def ask_times(num, end=WindowEnd.STOPPED):
    """Lets training go on `num` times."""
    left = iter([None] * num)
    return lambda: next(left, end)


@pytest.mark.parametrize("end", [WindowEnd.STOPPED, WindowEnd.WORK])
def test_a_window_lasts_until_it_is_told_to_end(end):
    """It asks before every step, and never begins one after the answer."""
    spot = make_spot(counting_trainer())
    assert spot.train(7, ask_times(3, end)) is end
    (window,) = spot.windows
    assert dataclasses.asdict(window) | {"seconds": 0, "first_step_s": 0, "longest_step_s": 0} == {
        "window_id": 7,
        "worker": 0,
        "step": 3,
        "num_steps": 3,
        "tokens": 3 * ROWS,
        "seconds": 0,
        "first_step_s": 0,
        "longest_step_s": 0,
        "loss": 2.0,
        "top1": 0.5,
        "accept_before": None,
        "accept_after": None,
        "end": end,
    }
    assert 0.0 < window.first_step_s <= window.seconds and 0.0 < window.longest_step_s <= window.seconds
    np.testing.assert_array_equal(spot.state.params["w"], [3.0, 3.0])
    assert spot.tokens == 3 * ROWS
    assert spot.train(8, ask_times(0)) is WindowEnd.STOPPED and spot.windows[1].num_steps == 0


def test_a_window_ends_when_training_no_longer_helps():
    """Gains at steps 2 and 6; none worth the name at 4, 8 and 10: over after two in a row. Gains are handed out."""
    better = []
    trainer = counting_trainer(accept_lens=[1.0, 1.5, 1.55, 1.7, 1.7, 1.79])
    spot = make_spot(trainer, on_better=lambda params: better.append(float(params["w"][0])))
    assert spot.train(1, ask_times(99)) is WindowEnd.BUDGET
    (window,) = spot.windows
    assert (window.num_steps, window.accept_before, window.accept_after) == (10, 1.0, pytest.approx(1.79))
    assert better == [2.0, 6.0]
    patient = make_spot(counting_trainer(accept_lens=[1.0] * 9), patience=0)
    assert patient.train(1, ask_times(12)) is WindowEnd.STOPPED and patient.windows[0].num_steps == 11


def test_without_data_a_window_waits():
    asked = []
    spot = make_spot(counting_trainer(has_data=lambda: len(asked) > 2))
    left = ask_times(4)
    assert spot.train(1, lambda: asked.append(0) or left()) is WindowEnd.STOPPED
    assert spot.windows[0].num_steps == 2


def test_a_failure_is_counted_and_the_drafter_goes_on_from_the_last_good_one(caplog):
    """The rollout does not hear of it; what was trained since weights were last handed out is lost."""
    spot = make_spot(counting_trainer(fails_at=4))
    assert spot.train(1, ask_times(9)) is WindowEnd.FAILED
    assert spot.num_failures == 1 and spot.windows[0].end == "failed" and "out of memory" in caplog.text
    np.testing.assert_array_equal(spot.state.params["w"], [2.0, 2.0])
    assert spot.tokens == 2 * ROWS
    assert spot.train(2, ask_times(1)) is WindowEnd.STOPPED and spot.tokens == 3 * ROWS


def test_snapshots_hold_the_trainable_weights(tmp_path):
    """Written in the background; a copy, so that the next step may take the weights along."""
    spot = make_spot(counting_trainer(), worker=4, directory=tmp_path, checkpoint_every_s=1e-9)
    spot.train(1, ask_times(3))
    spot.close()
    saved = load_file(tmp_path / "worker_4.safetensors")
    assert list(saved) == ["w"] and saved["w"][0] in (1.0, 2.0, 3.0)  # one is written at a time


def test_responses_to_a_prompt_are_trained_on_or_measured_on():
    data = Data(BufferConfig(), 0.3)
    data.start_step(1)
    for prompt, sample_id in itertools.product(range(60), range(2)):
        tokens = np.array([prompt, 1, 2, sample_id, 5], np.int32)
        features = np.zeros((4, 2), jnp.bfloat16)
        data.add(FeatureTrace(request_id=0, token_ids=tokens, prompt_len=3, features=features, step=1))
    train, held_out = ([int(t.token_ids[0]) for t in part.traces] for part in (data.train, data.held_out))
    assert len(train) + len(held_out) == 120 and not set(train) & set(held_out)
    assert 8 <= len(held_out) // 2 <= 28 and all(held_out.count(p) == 2 for p in held_out)
    with pytest.raises(ValueError, match=r"coordinator.held_out_frac: got 1.0, expected in \[0, 1\)"):
        SpotConfig(held_out_frac=1.0)


class Engines:
    """Notes what is loaded where."""

    def __init__(self, num):
        self.engines = [types.SimpleNamespace(worker=i) for i in range(num)]
        self.loaded = []

    def load(self, engine, params, version):
        self.loaded.append((engine.worker, float(params["w"][0]), version))


def test_a_step_of_the_loop(tmp_path):
    """Two workers train 4 and 2 steps, a third none: (4 * 4 + 2 * 2) / 6. Best ones are swapped in meanwhile."""
    engines = Engines(3)
    trainers = [counting_trainer(accept_lens=[1.0, 2.0, 2.0]), counting_trainer(), counting_trainer()]
    spots = [make_spot(t, worker=i) for i, t in enumerate(trainers)]
    (tmp_path / "windows_0.jsonl").write_text('{"step": 2}\n{"step": 3}\n{"step')  # of a run that was killed
    online = OnlineDrafter(engines.engines, spots, spots[0].data, engines.load, directory=tmp_path)
    online.start_step(3)
    spots[0].data.held_out.start_step(-1)
    spots[0]._on_better = online.take
    online.before_step(engines.engines[2])
    assert engines.loaded == []
    spots[0].train(1, ask_times(5))
    for _ in range(2):
        online.before_step(engines.engines[2])
    assert engines.loaded == [(2, 2.0, 0)]  # once
    spots[1].train(2, ask_times(2))
    metrics = online.finish_step()
    assert metrics == {
        "drafter/windows": 2.0,
        "drafter/failures": 0.0,
        "drafter/swaps": 1.0,
        "drafter/train_steps": 6.0,
        "drafter/train_s": pytest.approx(metrics["drafter/train_s"]),
        "drafter/loss": 2.0,
        "drafter/top1": 0.5,
        "drafter/accept_before": 1.0,
        "drafter/accept_after": 2.0,
        "drafter/version": 1,
        "drafter/tokens": 6.0 * ROWS,
    }
    for spot in spots:
        np.testing.assert_allclose(spot.state.params["w"], [20 / 6] * 2, rtol=1e-6)
        assert (int(spot.state.step), int(spot.state.tokens), spot.tokens) == (4, 4 * ROWS, 0)
    online.publish()
    assert [x[0] for x in engines.loaded[1:]] == [0, 1, 2] and {x[2] for x in engines.loaded[1:]} == {1}
    assert online.finish_step()["drafter/version"] == 1  # nobody trained: nothing new
    online.close()
    rows = [json.loads(line) for line in (tmp_path / "windows_0.jsonl").read_text().splitlines()]
    assert rows.pop(0) == {"step": 2}
    assert [(r["window_id"], r["worker"], r["num_steps"], r["end"]) for r in rows] == [
        (1, 0, 4, "stopped"),
        (2, 1, 2, "stopped"),
    ]


def test_data_of_checkpoints_that_are_gone_is_removed(tmp_path):
    """So is what a killed process left half-written; another process's files stay."""
    spot = make_spot(counting_trainer())
    online = OnlineDrafter([], [spot], spot.data, lambda *_: None, directory=tmp_path)
    for name in (".data_0_00000001.safetensors.7.tmp", "data_0_00000001.safetensors", "data_1_00000001.safetensors"):
        (tmp_path / name).touch()
    for step, keep in ((2, ()), (3, (2,)), (4, (2, 3))):
        online.save_data(step, keep)
    online.save_data(5, (2, 4))
    online.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"data_0_0000000{step}.safetensors" for step in (2, 4, 5)),
        "data_1_00000001.safetensors",
    ]


def test_a_restored_drafter_goes_on_with_its_optimizer():
    """C14: weights, optimizer, counts and version."""
    engines = Engines(1)
    spot = make_spot(counting_trainer())
    online = OnlineDrafter(engines.engines, [spot], spot.data, engines.load)
    spot.train(1, ask_times(3))
    online.finish_step()
    state, facts = online.get_state()
    assert facts == {"version": 1} and all(isinstance(x, np.ndarray) for x in jax.tree.leaves(state))
    other_spot = make_spot(counting_trainer())
    other = OnlineDrafter(engines.engines, [other_spot], other_spot.data, engines.load)
    other.set_state(state, facts)
    assert jax.tree.map(float, (other_spot.state.step, other_spot.state.tokens)) == (3, 3 * ROWS)
    other.publish()
    assert engines.loaded[-1] == (0, 3.0, 1) and other_spot.tokens == 0


def test_a_real_drafter_learns_in_a_window_and_its_target_stays_as_it_is():
    """The target's parameters are the same to the bit before and after; accept length on held-out traces rises."""
    config, draft_params, target_params = make()
    before = jax.tree.map(np.array, target_params)
    prompts = np.random.default_rng(0).integers(0, 96, (16, 36)).astype(np.int32)
    tokens, features = (np.asarray(x) for x in sample(target_params, jnp.asarray(prompts), jax.random.key(0)))
    data = Data(BufferConfig(), 0.3)
    data.start_step(1)
    for i in range(16):
        rows = features[i, :-1].astype(jnp.bfloat16)
        data.add(FeatureTrace(request_id=i, token_ids=tokens[i], prompt_len=4, features=rows, step=1))
    trainer = make_draft_trainer(
        config,
        LossConfig(logit_weight=1.0, chunk_rows=64),
        DraftOptimConfig(learning_rate=5e-3),
        batch=BatchConfig(row_len=72, context_len=4, num_rows=4),
        eval_steps=2,
    )
    engine = types.SimpleNamespace(worker=0, weights=Versioned(target_params, 1))
    spot = SpotTrainer(engine, trainer, draft_params, data, SpotConfig(eval_every=40, patience=0))
    assert spot.train(1, ask_times(41)) is WindowEnd.STOPPED
    (window,) = spot.windows
    assert window.num_steps == 40 and spot.tokens == window.tokens > 40 * 100
    assert window.accept_after > window.accept_before + 0.1
    for got, want in zip(jax.tree.leaves(target_params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got, want)
