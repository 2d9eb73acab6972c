import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from tlt_jax import checkpoint

CONFIG = checkpoint.CheckpointConfig(num_keep=3, best_metric="reward")


def _tree(value: float) -> dict[str, jax.Array]:
    return {"w": jnp.full((4, 3), value, jnp.float32), "b": jnp.full((3,), -value, jnp.float32)}


def _save_all(directory, steps, config=CONFIG, metric=lambda step: -step):
    store = checkpoint.CheckpointStore(directory, config)
    for step in steps:
        store.save(step, {"policy": _tree(step), "host": {"step": step}}, metrics={"reward": metric(step)})
    store.close()


def _restore_values(directory, config=CONFIG):
    store = checkpoint.CheckpointStore(directory, config)
    restored = store.restore({"policy": _tree(0), "host": None})
    store.close()
    return restored


def test_newest_are_kept_for_resuming_and_the_best_apart(tmp_path):
    """C1: with a falling metric the newest three and the first, the best one, are on disk."""
    _save_all(tmp_path, range(100, 600, 100))
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    assert store.steps() == [100, 300, 400, 500]
    assert (store.latest_step(), store.best_step()) == (500, 100)
    best = store.restore({"policy": _tree(0)}, step=100)
    np.testing.assert_array_equal(best.items["policy"]["w"], np.full((4, 3), 100.0))


def test_best_by_a_falling_metric_and_among_equals_the_newest(tmp_path):
    config = checkpoint.CheckpointConfig(num_keep=1, best_metric="reward", best_mode="min")
    _save_all(tmp_path, [1, 2, 3, 4], config, metric=lambda step: {1: 5.0, 2: 0.5, 3: 0.5, 4: float("nan")}[step])
    store = checkpoint.CheckpointStore(tmp_path, config)
    assert (store.steps(), store.best_step()) == ([3, 4], 3)


def test_items_come_back_by_name_and_optional_ones_may_be_missing(tmp_path):
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    buffer = {"ids": np.arange(5), "lengths": np.ones(2, np.int8)}
    store.save(7, {"policy": _tree(1.0), "buffer": buffer, "bandit": {"arms": [1, 2], "name": "beg"}})
    store.close()
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    restored = store.restore({"buffer": buffer, "bandit": None, "drafter": _tree(0)}, optional=("drafter",))
    assert sorted(restored.items) == ["bandit", "buffer"]
    assert restored.items["bandit"] == {"arms": [1, 2], "name": "beg"}
    np.testing.assert_array_equal(restored.items["buffer"]["ids"], [0, 1, 2, 3, 4])
    assert restored.items["buffer"]["lengths"].dtype == np.int8
    with pytest.raises(ValueError, match=r"lacks \['drafter'\], it holds \['bandit', 'buffer', 'policy'\]"):
        store.restore({"drafter": _tree(0)})
    store.close()


def test_part_of_an_item_is_read_alone(tmp_path):
    """The policy of a training state, without its optimizer; what was not saved is named."""
    _save_all(tmp_path, [3])
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    store.save(4, {"state": {"params": _tree(2.0), "opt": (_tree(3.0), jnp.int32(9))}})
    store.close()
    store = checkpoint.CheckpointStore(tmp_path, CONFIG, read_only=True)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    target = {"params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _tree(0))}
    part = store.restore_part("state", target, step=4)
    assert part.keys() == {"params"} and part["params"]["w"].sharding == sharding
    np.testing.assert_array_equal(part["params"]["b"], np.full(3, -2.0))
    with pytest.raises(ValueError, match=r"step 3 .* has no arrays under the name 'state'"):
        store.restore_part("state", target, step=3)
    target["params"]["c"] = target["params"]["w"]
    with pytest.raises(ValueError, match=r"saved and wanted: {'params/c': \(None, \[4, 3\]\)}"):
        store.restore_part("state", target, step=4)


def test_a_new_directory_has_nothing_to_restore(tmp_path):
    store = checkpoint.CheckpointStore(tmp_path / "new", CONFIG)
    assert (store.steps(), store.latest_step(), store.best_step()) == ([], None, None)
    assert store.restore({"policy": _tree(0)}) is None


def test_what_the_caller_does_after_save_does_not_reach_the_file(tmp_path):
    """The learner donates its parameters to the next update as soon as `save` returns."""
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
    params = {"w": jnp.arange(1_000_000, dtype=jnp.float32)}
    host = np.arange(1000)
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    store.save(1, {"policy": params, "host": {"ids": host}})
    new = update(params)
    host[:] = -1
    assert params["w"].is_deleted()
    store.close()
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    restored = store.restore({"policy": new, "host": {"ids": host}})
    np.testing.assert_array_equal(restored.items["policy"]["w"], np.arange(1_000_000))
    np.testing.assert_array_equal(restored.items["host"]["ids"], np.arange(1000))


@pytest.mark.parametrize("call", ["save", "close"])
def test_a_failed_background_save_is_raised_with_its_step(tmp_path, call):
    """C2: files may not grow past 20 kB, as on a full disk; the next call says which checkpoint is missing."""
    _save_all(tmp_path, [10])
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        store.save(20, {"policy": {"w": jnp.asarray(np.random.default_rng(0).normal(size=100_000))}})
        with pytest.raises(checkpoint.CheckpointError, match=r"step 20 could not be written .* complete .*: \[10\]"):
            if call == "save":
                store.save(21, {"policy": _tree(21)})
            else:
                store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _restore_values(tmp_path).step == 10


def test_a_directory_that_cannot_be_written_fails_with_the_step(tmp_path):
    """C2."""
    store = checkpoint.CheckpointStore(tmp_path / "checkpoints", CONFIG)
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(checkpoint.CheckpointError, match="step 3 could not be written"):
        store.save(3, {"policy": _tree(3)})


def test_unfinished_directories_are_never_chosen(tmp_path):
    """C3: an empty step, one without an item, one half deleted and a temporary one are passed over, then cleared."""
    _save_all(tmp_path, [10])
    (tmp_path / "00000030").mkdir()
    subprocess.run(["cp", "-r", tmp_path / "00000010", tmp_path / "00000040"], check=True)
    manifest = tmp_path / "00000040" / "manifest" / "metadata"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "step": 40}))
    subprocess.run(["rm", "-r", tmp_path / "00000040" / "policy"], check=True)
    (tmp_path / "00000050.deleted").mkdir()
    (tmp_path / "00000060.orbax-checkpoint-tmp").mkdir()
    reader = checkpoint.CheckpointStore(tmp_path, CONFIG, read_only=True)
    assert reader.latest_step() == 10
    assert len(list(tmp_path.iterdir())) == 5, "a reader leaves the files of a running job alone"
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["00000010"]
    store.save(30, {"policy": _tree(30), "host": {"step": 30}})
    store.close()
    restored = _restore_values(tmp_path)
    assert (restored.step, restored.items["host"]) == (30, {"step": 30})


def test_a_step_is_never_saved_twice_or_backwards_without_a_word(tmp_path):
    """C3: the same or a lower step is an error, until the later ones are removed on purpose."""
    _save_all(tmp_path, [10, 20])
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    for step in (10, 15, 20):
        with pytest.raises(ValueError, match=f"got step {step}, expected one after 20"):
            store.save(step, {"policy": _tree(step)})
    store.delete_after(10)
    store.save(15, {"policy": _tree(15), "host": {}})
    store.close()
    assert checkpoint.CheckpointStore(tmp_path, CONFIG).steps() == [10, 15]


def test_nothing_is_deleted_before_the_newer_one_is_complete(tmp_path):
    """C4: while the new checkpoint is being written the old one is the newest; it goes after the commit."""
    config = checkpoint.CheckpointConfig(num_keep=1)
    store = checkpoint.CheckpointStore(tmp_path, config)
    store.save(1, {"policy": _tree(1), "host": {"step": 1}})
    store.wait()
    store.save(2, {"policy": _tree(2), "host": {"step": 2}})
    assert "00000001" in os.listdir(tmp_path)
    store.close()
    assert os.listdir(tmp_path) == ["00000002"]


# Saves steps one after the other, each value equal to its step, and is killed at a moment that argv names.
KILLED = textwrap.dedent("""
    import os, signal, sys, threading
    import jax.numpy as jnp
    from tlt_jax import checkpoint

    directory, moment = sys.argv[1:]
    kill = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    store = checkpoint.CheckpointStore(directory, checkpoint.CheckpointConfig(num_keep=1))
    start = (store.latest_step() or 0) + 1
    for step in range(start, start + 3):
        if step == start + 1:
            print(start, flush=True)
            if moment == "before_commit":
                store._checkpointer._handler.finalize = kill
            elif moment == "mid_delete":
                checkpoint.epath.Path.rmtree = kill
                type(store._dir).rmtree = kill
            elif moment != "after_save":
                threading.Timer(float(moment), kill).start()
        tree = {"w": jnp.full((500_000,), step), "b": jnp.full((3,), step)}
        store.save(step, {"policy": tree, "host": {"step": step}})
        if step == start + 1 and moment == "after_save":
            kill()
        store.wait()
    threading.Event().wait(20)
""")


def _kill_and_check(directory, moments):
    """The steps restored after each kill."""
    last, found = 0, []
    for moment in moments:
        run = subprocess.run(
            [sys.executable, "-c", KILLED, directory, moment], capture_output=True, text=True, timeout=120
        )
        assert run.returncode == -signal.SIGKILL, run.stderr
        first_saved = int(run.stdout)
        assert first_saved > last
        store = checkpoint.CheckpointStore(directory, checkpoint.CheckpointConfig(num_keep=1))
        target = {"w": jnp.zeros(500_000, jnp.int32), "b": jnp.zeros(3, jnp.int32)}
        restored = store.restore({"policy": target, "host": None})
        last = restored.step
        assert first_saved <= last <= first_saved + 2
        assert restored.items["host"] == {"step": last}
        assert set(np.unique(restored.items["policy"]["w"])) == {last}
        assert set(np.unique(restored.items["policy"]["b"])) == {last}
        assert all(path.is_dir() and path.name.isdigit() for path in directory.iterdir())
        found.append(last)
    return found


def test_sigkill_in_mid_save_leaves_the_last_good_checkpoint(tmp_path):
    """C3, C4: killed with the write in flight."""
    (step,) = _kill_and_check(tmp_path, ["before_commit"])
    assert step >= 1


@pytest.mark.slow
def test_sigkill_at_many_moments_leaves_the_last_good_checkpoint(tmp_path):
    """C3, C4: killed right after `save` returns, before the commit, in the middle of a deletion, and by the clock."""
    found = _kill_and_check(tmp_path, ["after_save", "before_commit", "mid_delete", "0.003", "0.01", "0.02", "0.04"])
    assert len(found) == 7 and found == sorted(set(found))  # every run went further than the one before


def test_a_checkpoint_of_eight_devices_is_restored_on_one_and_four(tmp_path):
    """C9, and C8 for host state: it is one global value, whatever the number of processes or devices."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    value = np.arange(16 * 6, dtype=np.float32).reshape(16, 6)
    policy = {"w": jax.device_put(value, NamedSharding(mesh, P("fsdp")))}
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    store.save(1, {"policy": policy, "host": {"prompt_index": 12}})
    store.close()
    for count, spec in ((1, P()), (4, P(None, None)), (4, P("fsdp")), (2, P(None, "fsdp"))):
        smaller = Mesh(np.array(jax.devices()[:count]), ("fsdp",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(smaller, spec)
        store = checkpoint.CheckpointStore(tmp_path, CONFIG)
        restored = store.restore(
            {"policy": {"w": jax.ShapeDtypeStruct((16, 6), "float32", sharding=sharding)}, "host": None}
        )
        assert restored.items["policy"]["w"].sharding == sharding
        np.testing.assert_array_equal(restored.items["policy"]["w"], value)
        assert restored.items["host"] == {"prompt_index": 12}
        assert restored.manifest["num_devices"] == 8
    with pytest.raises(ValueError, match="got a target without sharding"):
        store.restore({"policy": {"w": jax.ShapeDtypeStruct((16, 6), "float32")}})


def test_a_target_of_another_model_lists_names_and_shapes(tmp_path):
    _save_all(tmp_path, [1])
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    message = r"only in the checkpoint: \['b'\]; only in the target: \['c'\]; .* shapes: {'w': \(\[4, 3\], \[4, 5\]\)}"
    with pytest.raises(ValueError, match=message):
        store.restore({"policy": {"w": jnp.zeros((4, 5)), "c": jnp.zeros(3)}})
    with pytest.raises(ValueError, match="expected one for a JSON value"):
        store.restore({"host": _tree(0)})
    with pytest.raises(ValueError, match=r"got step 5, expected one of \[1\]"):
        store.restore({"policy": _tree(0)}, step=5)


def test_an_item_that_is_neither_pytree_nor_json_is_refused(tmp_path):
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="got dict for 'host', expected a pytree of arrays or a value JSON can hold"):
        store.save(1, {"host": {"state": object()}})
    with pytest.raises(ValueError, match="this one is the store's own"):
        store.save(1, {"manifest": {}})
    store.close()
    assert list(tmp_path.iterdir()) == []


def _train(directory, num_steps: int, every: int):
    """A toy loop: the way in which the step, the optimizer and the log are tied."""
    optimizer = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
    params = {"w": jnp.ones(3)}
    state = {"params": params, "opt": optimizer.init(params)}
    store = checkpoint.CheckpointStore(directory, CONFIG)
    restored = store.restore({"learner": state})
    start = 0
    if restored is not None:
        start, state = restored.step, restored.items["learner"]

    @jax.jit
    def update(state, step):
        updates, opt = optimizer.update({"w": state["params"]["w"] * (step + 1)}, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    rows = []
    for step in range(start, num_steps):
        state = update(state, np.int32(step))
        rows.append((step, int(state["opt"][0].count), float(state["params"]["w"][0])))
        if (step + 1) % every == 0:
            store.save(step + 1, {"learner": state}, summary={"optimizer_count": rows[-1][1]})
    store.close()
    return rows


def test_step_of_the_file_is_the_number_of_updates_and_where_the_loop_goes_on(tmp_path):
    """C11: counts, schedule and values of a run stopped twice equal those of one that was not."""
    straight = _train(tmp_path / "a", 10, every=10)
    stopped = [_train(tmp_path / "b", n, every=n) for n in (4, 7, 10)]
    assert [row for rows in stopped for row in rows] == straight
    assert [row[0] for row in stopped[1]] == [4, 5, 6]
    manifest = checkpoint.CheckpointStore(tmp_path / "b", CONFIG).restore({}).manifest
    assert (manifest["step"], manifest["summary"]["optimizer_count"]) == (10, 10)


def test_the_log_line_says_what_was_restored(tmp_path):
    """H8."""
    store = checkpoint.CheckpointStore(tmp_path, CONFIG)
    summary = {"data_index": 48, "optimizer_count": 12, "seed": 5, "policy_version": 12, "drafter_version": 3}
    store.save(12, {"policy": _tree(1), "host": {"a": 1}}, summary=summary)
    store.close()
    line = _restore_values(tmp_path).describe()
    assert line.startswith(
        "restored step 12 | data_index 48 | optimizer_count 12 | seed 5 | policy_version 12 | drafter_version 3 | "
        "items host+policy | saved by jax "
    )
    assert line.endswith("saved on 8 devices in 1 processes")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_keep", 0, "got 0, expected >= 1"),
        ("every_steps", -1, "got -1, expected >= 0"),
        ("best_mode", "low", "got 'low', expected 'max' or 'min'"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.CheckpointConfig(**{field: value})
