"""The loop end to end on a tiny model: resume, invariance, dynamic sampling, metrics, memory."""

import gc
import re
import time

import jax
import numpy as np
import pytest

from tests import tiny_model
from tests.tiny_model import LocalRewards, make_loop, read_metrics, read_rollouts, run_loop, sections
from tlt_jax.metrics import read_jsonl
from tlt_jax.rl.rewards import RewardConfig, RewardPool

# What API.md promises, as far as it exists without drafters.
METRICS = {
    "time": "step_s rollout_s reward_s logprob_s update_s publish_s checkpoint_s",
    "rollout": "tokens tokens_per_s len_mean len_p50 len_p90 len_p99 len_max truncated_frac",
    "spec": "accept_len drafted accepted",
    "worker": "idle_frac idle_used_frac",
    "rl": "reward_mean reward_std kl entropy clip_frac logprob_gap grad_norm valid_tokens dropped_groups",
    "reward": "errors timeouts",
    "compile": "count seconds",
    "memory": "host_bytes device_bytes live_arrays",
}
COLUMNS = ("prompt_id", "request_id", "sample", "policy_version", "response_len", "reward", "advantage", "text")
SAME = ("rollout/len", "rl/", "eval/", "reward/")  # metrics that a resumed run repeats


def digits(text, reference=None):
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def odd_digits(text, reference):
    """All responses to every other prompt score alike."""
    return digits(text) if int(reference["answer"]) % 2 else 0.5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Model, task and rewards; reward processes can import the reward functions."""
    root = tiny_model.make_files(tmp_path_factory.mktemp("tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        yield root


@pytest.fixture(scope="module")
def config(root):
    return sections(root, eval={"every": 2})


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """Four steps without a stop, and the workdir."""
    workdir = tmp_path_factory.mktemp("straight")
    with RewardPool(RewardConfig(**config["reward"])) as rewards:
        return run_loop(config, workdir, rewards), workdir


def assert_equal_trees(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def rows(workdir, columns=COLUMNS):
    return {step: [[row[c] for c in columns] for row in table] for step, table in read_rollouts(workdir).items()}


def learnt(workdir):
    """The metrics of each step that do not depend on time or machine."""
    metrics = {row["step"]: row for row in read_metrics(workdir)}
    return {step: {k: v for k, v in row.items() if k.startswith(SAME)} for step, row in metrics.items()}


def with_steps(config, num_steps, **rl):
    return config | {"rl": config["rl"] | {"num_steps": num_steps} | rl}


@pytest.mark.parametrize("stops", [(2, 4), (1, 3, 4)])
def test_a_resumed_run_is_the_uninterrupted_one(config, straight, tmp_path, stops, caplog):
    """C5, C7, C10, C11, C13, C15, H8: prompts, tokens, rewards, optimizer, weights and metrics equal to the bit."""
    loop, workdir = straight
    caplog.set_level("INFO", logger="absl")
    for i, num_steps in enumerate(stops):
        caplog.clear()
        resumed = run_loop(with_steps(config, num_steps), tmp_path, LocalRewards(digits))
        assert (resumed.first_step, resumed.step) == ((0, *stops)[i] + 1, num_steps)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("restored ")]
    for fact in (f"step {stops[-2]} |", f"optimizer_steps {stops[-2]} |", "data_position {", "seed 0"):
        assert len(said) == 1 and fact in said[0]
    assert rows(tmp_path) == rows(workdir)
    assert rows(workdir)[4] != rows(workdir)[1]
    assert_equal_trees(resumed.state, loop.state)
    assert int(resumed.state.step) == resumed.state.opt_state[1][0].count == 4
    ours, theirs = learnt(tmp_path), learnt(workdir)
    assert list(ours) == list(theirs) == [0, 1, 2, 3, 4]  # 0 is the evaluation before the first step
    assert ours[4] == theirs[4] and "eval/mean_at_k" in ours[4] and ours[2] == theirs[2]


def test_a_step_after_the_last_checkpoint_is_done_again(config, straight, tmp_path):
    """C5, H7: a run cut off past its checkpoint repeats those steps: rows once, same numbers."""
    _, workdir = straight
    changed = with_steps(config, 3) | {"checkpoint": {"every_steps": 2, "num_keep": 2}}
    loop = make_loop(changed, tmp_path, LocalRewards(digits))
    loop.checkpoint_items = lambda: pytest.fail("cut off") if loop.step == 3 else type(loop).checkpoint_items(loop)
    with pytest.raises(pytest.fail.Exception, match="cut off"):
        loop.run()
    loop.close()
    assert sorted(read_rollouts(tmp_path)) == [1, 2, 3] and loop.store.latest_step() == 2
    run_loop(with_steps(changed, 4), tmp_path, LocalRewards(digits))
    assert rows(tmp_path) == rows(workdir)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    timeline = read_jsonl(tmp_path / "timeline.jsonl")
    once = ("BUSY", "IDLE", "LEARNING")  # in the rollouts of steps 1 to 4, and the evaluations of 0, 2 and 4
    assert [(r["step"], r["state"]) for r in timeline] == [(s, x) for s in (0, 1, 2, 2, 3, 4, 4) for x in once]


@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_number_of_workers_changes_nothing(config, straight, tmp_path, num_workers):
    """Tokens, rewards, weights: the same whichever worker a request lands on; each worker has a timeline."""
    _, workdir = straight
    changed = with_steps(config, 2) | {"rollout": config["rollout"] | {"num_workers": num_workers}}
    run_loop(changed, tmp_path, LocalRewards(digits))
    assert rows(tmp_path) == {step: table for step, table in rows(workdir).items() if step <= 2}
    assert len({row["worker"] for row in read_rollouts(tmp_path)[1]}) == 2  # two prompts, and so two groups
    assert all(0.0 <= row["worker/idle_frac"] < 1.0 for row in read_metrics(tmp_path)[1:])
    timeline = read_jsonl(tmp_path / "timeline.jsonl")
    for w in range(num_workers):  # a worker may find waiting requests after it has run dry, and be busy again
        states = " ".join(r["state"] for r in timeline if r["worker"] == w)
        assert re.fullmatch(r"((BUSY IDLE )+LEARNING ?){4}", states)  # two rollouts, two evaluations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "mesh", "num_workers"),
    [(2, (2, 1, 1), 2), (4, (1, 2, 2), 2), (4, (2, 1, 2), 4), (8, (2, 4, 1), 8), (8, (1, 4, 2), 4)],
)
def test_any_mesh_gives_the_tokens_and_weights_of_one_device(
    config, straight, tmp_path, num_devices, mesh, num_workers
):
    """B4: data, fsdp and tensor shards in learner and workers; tokens equal, weights to 1e-5."""
    _, workdir = straight
    changed = with_steps(config, 2) | {"rollout": config["rollout"] | {"num_workers": num_workers}}
    changed["mesh"] = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    loop = run_loop(changed, tmp_path, LocalRewards(digits), num_devices)
    one = run_loop(with_steps(config, 2), tmp_path / "one", LocalRewards(digits))
    exact = ("prompt_id", "request_id", "response_len", "text", "reward")
    assert rows(tmp_path, exact) == {step: table for step, table in rows(workdir, exact).items() if step <= 2}
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-5),
        loop.state.params,
        one.state.params,
    )


def test_metrics_have_the_promised_names_and_phases_add_up(straight):
    """F10, H7, B25: names of API.md; the phases are the step; ratio 1 to the bit where the batch is one update."""
    loop, workdir = straight
    promised = {f"{part}/{name}" for part, names in METRICS.items() for name in names.split()}
    steps = read_metrics(workdir)[1:]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert promised <= row.keys()
        phases = sum(v for k, v in row.items() if k.startswith("time/") and k != "time/step_s")
        assert phases == pytest.approx(row["time/step_s"], rel=0.02)
        assert row["time/other_s"] >= 0.0 and row["time/rollout_s"] > 0.0 and row["time/update_s"] > 0.0
        assert (row["rl/ratio_mean"], row["rl/ratio_max"], row["reward/errors"]) == (1.0, 1.0, 0)
        assert row["rollout/tokens"] == row["rl/valid_tokens"] == sum(r[4] for r in rows(workdir)[row["step"]])
    assert loop.reporter.phases[-2:] == [(4, "done"), (0, "closed")]


def test_steps_follow_each_other_without_a_gap(config, tmp_path):
    """H7: a second that is spent on writing a step down is the next step's."""
    loop = make_loop(with_steps(config, 3) | {"eval": {}}, tmp_path, LocalRewards(digits))
    write, lost_s = loop.metrics.write, 0.5

    def slow_write(step, metrics):
        time.sleep(lost_s)
        return write(step, metrics)

    loop.metrics.write = slow_write
    start_s = time.perf_counter()
    loop.run()
    run_s = time.perf_counter() - start_s
    loop.close()
    steps = read_metrics(tmp_path)
    assert [row["time/other_s"] >= lost_s for row in steps] == [False, True, True]
    assert sum(row["time/step_s"] for row in steps) <= run_s - lost_s  # writing the last one down is in none


def test_rollouts_use_the_newest_weights_and_say_so(straight):
    """C13: step s decodes with version s - 1, whose log-probs the learner then finds again, though weights moved."""
    loop, workdir = straight
    for step, table in rows(workdir, ("policy_version",)).items():
        assert table == [[step - 1]] * 8
    assert all(row["rl/logprob_gap_max"] < 1e-4 for row in read_metrics(workdir)[1:])
    before = tiny_model.lively(tiny_model.init_params(tiny_model.MODEL, jax.random.key(3)))
    moved = jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), before, loop.state.params)
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_rewards_are_scored_while_the_tail_decodes(config, tmp_path):
    """G11: responses go to the pool as they finish."""
    scored = []

    def score(text, reference):
        scored.append(loop.workers.engines[0].has_work)
        return digits(text)

    loop = make_loop(with_steps(config, 1) | {"eval": {}}, tmp_path, LocalRewards(score))
    loop.run()
    loop.close()
    assert len(scored) == 8 and scored[:6] == [True] * 6  # two rows: six of the eight finish before the others


def test_a_failing_verifier_is_counted_and_the_run_goes_on(config, tmp_path):
    """G1, G8: one score per row in its own place; failures apart from wrong answers."""
    changed = with_steps(config, 2) | {"eval": {}}
    with RewardPool(RewardConfig(weights={"tiny_rewards:broken": 1.0}, num_workers=1)) as rewards:
        loop = run_loop(changed, tmp_path, rewards)
    for row in read_metrics(tmp_path):
        table = read_rollouts(tmp_path)[row["step"]]
        failed = [any(c in "aeiou" for c in r["text"]) for r in table]
        assert [r["reward"] for r in table] == [0.0 if f else 1.0 for f in failed]
        assert row["reward/errors"] == sum(failed) > 0 and row["reward/timeouts"] == 0
    assert "a reward failed and scored as failed: ValueError: a vowel" in loop.reporter.notes[0]


def dapo(config, **rl):
    return config | {
        "rl": config["rl"] | {"algorithm": "dapo", "num_steps": 1, "max_batches": 3, "overlong_filter": False} | rl,
        "eval": {},
    }


def test_groups_without_signal_are_replaced(config, tmp_path):
    """B17, B18: batches are drawn until P groups have a signal; the others are recorded, counted and not trained on."""
    loop = run_loop(dapo(config), tmp_path, LocalRewards(odd_digits))
    table = read_rollouts(tmp_path)[1]
    groups = [table[i : i + 4] for i in range(0, len(table), 4)]
    has_signal = [len({r["reward"] for r in group}) > 1 for group in groups]
    trained = [any(r["advantage"] for r in group) for group in groups]
    num_batches = len(groups) // 2
    assert 1 < num_batches <= 3 and sum(has_signal[: 2 * (num_batches - 1)]) < 2
    assert trained == has_signal and sum(trained) == 2
    (row,) = read_metrics(tmp_path)
    assert (row["rl/dropped_groups"], row["rl/num_updates"]) == (len(groups) - 2, 1.0)
    assert [r["request_id"] for r in table] == [24 + i for i in range(len(table))]  # step 1 x 3 batches x 8 rows
    assert int(loop.state.step) == 1


def test_a_step_without_any_signal_still_ends(config, tmp_path):
    """B17: constant rewards everywhere: as many batches as allowed, no update, weights as they were, next step."""
    loop = make_loop(dapo(config, num_steps=2, max_batches=2), tmp_path, LocalRewards(lambda *_: 1.0))
    before = jax.tree.map(np.array, loop.state.params)
    loop.run()
    loop.close()
    assert_equal_trees(loop.state.params, before)
    for row in read_metrics(tmp_path):
        assert (row["rl/dropped_groups"], row["rl/num_updates"], row["rl/valid_tokens"]) == (4.0, 0.0, 0.0)
        assert row["rl/reward_mean"] == 1.0
    assert [len(table) for table in read_rollouts(tmp_path).values()] == [16, 16]


def assert_finite(workdir):
    (row,) = read_metrics(workdir)
    assert [k for k, v in row.items() if v is None] == []
    return row


@pytest.mark.slow
def test_reference_in_the_loss_with_several_updates(config, tmp_path):
    """B9, C11: two passes of two minibatches are four optimizer steps; the reference is the model that was loaded."""
    changed = with_steps(config, 1, kl_coef=0.04, num_minibatches=2, num_iterations=2) | {"eval": {}}
    loop = run_loop(changed, tmp_path, LocalRewards(digits))
    row = assert_finite(tmp_path)
    assert (row["rl/num_updates"], int(loop.state.step)) == (4.0, 4)
    assert row["rl/kl"] > 0.0 and row["rl/ratio_max"] > 1.0 and row["time/logprob_s"] > 0.0
    assert row["rl/valid_tokens"] == 2 * row["rollout/tokens"]
    before = tiny_model.lively(tiny_model.init_params(tiny_model.MODEL, jax.random.key(3)))
    assert_equal_trees(loop.ref_params, before)


@pytest.mark.slow
def test_reference_in_the_reward_and_a_truncated_law(config, tmp_path):
    """B2: top-p with truncated importance sampling; KL off the reward is 0 while the policy is the reference."""
    rl = {"algorithm": "rloo", "kl_coef": 0.05, "tis_cap": 2.0}
    changed = with_steps(config, 1, **rl) | {"rollout": config["rollout"] | {"top_p": 0.8}, "eval": {}}
    loop = run_loop(changed, tmp_path, LocalRewards(digits))
    row = assert_finite(tmp_path)
    assert abs(row["rl/kl"]) < 1e-4 and row["rl/ratio_max"] == 1.0
    assert 0.5 < row["rl/tis_mean"] < 1.0 and row["rl/logprob_gap"] > 0.0  # the full softmax gives a token less
    assert int(loop.state.step) == 1


@pytest.mark.slow
def test_fifty_steps_at_rate_zero_leak_compile_and_drift_nothing(config, tmp_path):
    """B24, H3, H4: same shapes from step 3 on, so nothing compiles; arrays and device bytes flat; log-prob gap flat."""
    rollout = config["rollout"] | {"ignore_eos": True}
    changed = with_steps(config, 50, learning_rate=0.0) | {"rollout": rollout, "eval": {}}
    changed["checkpoint"] = {"every_steps": 0}
    gc.collect()  # loops of other tests
    loop = run_loop(changed, tmp_path, LocalRewards(digits))
    steps = read_metrics(tmp_path)
    assert [row["step"] for row in steps] == list(range(1, 51))
    # The last step holds a copy of the state, which its checkpoint is written from.
    assert [row["compile/count"] for row in steps[2:-1]] == [0] * 47
    assert len({row["memory/live_arrays"] for row in steps[1:-1]}) == 1
    assert len({row["memory/device_bytes"] for row in steps[1:-1]}) == 1
    gaps = np.array([row["rl/logprob_gap"] for row in steps])
    assert gaps.max() < 1e-5 and abs(gaps[:10].mean() - gaps[-10:].mean()) < 1e-6
    # The host's own memory is flat too, up to what allocators keep.
    assert steps[-1]["memory/host_bytes"] - steps[9]["memory/host_bytes"] < 16 * 2**20
    assert int(loop.state.step) == 50
