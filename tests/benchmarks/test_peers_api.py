"""The part of benchmarks/peers that runs in our own environment: jobs, scenarios, results, peers as children."""

import json
import os
import pathlib
import stat

import numpy as np
import pytest

from benchmarks.peers import api, harness, job, make_tiny

RESULT = {"peer": "tunix", "kind": "rollout", "tok_s": 10.0, "cpu_s": 1.0, "compile_s": 0.5, "versions": {"jax": "1"}}


@pytest.fixture
def rollout_fields(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return {
        "kind": "rollout",
        "model_dir": str(tmp_path),
        "prompts": [[1, 2], [3]],
        "max_new_tokens": [4, 2],
        "batch_size": 2,
    }


@pytest.fixture
def train_fields(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return {
        "kind": "train",
        "model_dir": str(tmp_path),
        "prompts": [[1, 2], [3]],
        "responses": [[4], [5, 6]],
        "advantages": [1.0, -1.0],
        "micro_batch": 1,
    }


@pytest.fixture
def fake_peer(tmp_path, monkeypatch):
    """Puts a shell script in the place of the tunix environment's Python."""

    def install(script: str) -> None:
        bin_dir = tmp_path / "envs" / "tunix" / "bin"
        bin_dir.mkdir(parents=True)
        python = bin_dir / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        (bin_dir.parent / api.READY_FILE).touch()

    monkeypatch.setenv(api.ENVS_VARIABLE, str(tmp_path / "envs"))
    return install


def test_rollout_job_fills_defaults_and_kv_capacity(rollout_fields):
    checked = job.job_from_dict(rollout_fields)
    assert checked.kv_capacity == 2 + 4
    assert (checked.temperature, checked.warmup, checked.stop_token_ids) == (1.0, 1, [])


def test_train_job_counts_prompt_and_response_tokens(train_fields):
    assert job.job_from_dict(train_fields).num_tokens == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokns": [4, 2]}, "'max_new_tokns' is not known.*did you mean 'max_new_tokens'"),
        ({"kind": "serve"}, "got 'serve', expected one of"),
        ({"max_new_tokens": [4]}, "got '1 lengths', expected one per prompt \\(2\\)"),
        ({"max_new_tokens": [4, 0]}, "integers >= 1"),
        ({"prompts": [[1], []]}, "non-empty lists of token ids"),
        ({"prompts": [[1], [True]]}, "non-empty lists of token ids"),
        ({"threads": 0}, "'threads': got 0, expected an integer >= 1"),
        ({"warmup": 0}, "'warmup': got 0"),
        ({"dtype": "float16"}, "'dtype': got 'float16'"),
        ({"temperature": -1.0}, "'temperature': got -1.0"),
        ({"kv_tokens": 5}, "'kv_tokens': got 5, expected 0 or at least 6"),
        ({"model_dir": "no/such/dir"}, "'model_dir': got 'no/such/dir'"),
    ],
)
def test_bad_rollout_jobs_are_refused(rollout_fields, change, message):
    with pytest.raises(ValueError, match=message):
        job.job_from_dict(rollout_fields | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch": 3}, "'micro_batch': got 3, expected a divisor of the 2 rows"),
        ({"advantages": [1.0]}, "'advantages': got '1', expected 2"),
        ({"behaviour_logprobs": [[-1.0], [-1.0]]}, "lengths \\[1, 1\\]"),
        ({"temperature": 0.0}, "expected a number > 0"),
    ],
)
def test_bad_train_jobs_are_refused(train_fields, change, message):
    with pytest.raises(ValueError, match=message):
        job.job_from_dict(train_fields | change)


def test_missing_field_is_named(rollout_fields):
    del rollout_fields["batch_size"]
    with pytest.raises(ValueError, match="lacks \\['batch_size'\\]"):
        job.job_from_dict(rollout_fields)


def test_scenarios_are_the_same_everywhere():
    fixed = job.scenario_requests("fixed", vocab_size=8192)
    assert fixed["max_new_tokens"] == [256] * 16
    assert {len(prompt) for prompt in fixed["prompts"]} == {64}
    tail = job.scenario_requests("longtail", vocab_size=8192)
    assert (len(tail["prompts"]), tail["batch_size"], tail["kv_tokens"]) == (64, 16, 320)
    assert tail["max_new_tokens"][:6] == [64, 52, 109, 33, 137, 83]
    assert sum(tail["max_new_tokens"]) == 4_023
    assert max(max(prompt) for prompt in tail["prompts"]) < 8192


def test_geometric_lengths_have_their_mean_and_cap():
    lengths = job.geometric_lengths(64, 64, 256, seed=1)
    expected = 64 * (1 - (1 - 1 / 64) ** 256)  # mean of min(geometric, cap)
    assert abs(sum(lengths) / len(lengths) - expected) < 0.5
    assert (min(lengths), max(lengths)) == (1, 256)
    assert sorted(lengths) == sorted(job.geometric_lengths(64, 64, 256, seed=2))


def test_unknown_peer_and_scenario_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'tunix'"):
        api.available("tunx")
    with pytest.raises(ValueError, match="'fixed' or 'longtail'"):
        job.scenario_requests("long", vocab_size=10)


def test_availability_follows_the_ready_file(fake_peer):
    assert not api.available("tunix")
    fake_peer("true")
    assert api.available("tunix")
    assert not api.available("vllm")


def test_peer_not_installed_says_how_to(rollout_fields, fake_peer):
    with pytest.raises(api.PeerError, match=r"setup\.sh tunix"):
        api.run_peer("tunix", rollout_fields, timeout_s=5)


def test_peer_refuses_a_kind_it_does_not_take(train_fields):
    with pytest.raises(ValueError, match=r"peer 'vllm': got a job of kind 'train', expected one of \['rollout'\]"):
        api.run_peer("vllm", train_fields, timeout_s=5)


def test_result_of_a_peer_comes_back(rollout_fields, fake_peer):
    """The runner's module and the job file are its arguments; noise around the result is passed over."""
    fake_peer(f"""echo loading; test "$2" = benchmarks.peers.run_tunix || exit 9
grep -q '"max_new_tokens": \\[4, 2\\]' "$3" || exit 8
echo '{json.dumps(RESULT)}'; echo '{{not json'""")
    assert api.run_peer("tunix", rollout_fields, timeout_s=30) == RESULT


def test_settings_of_ours_do_not_reach_a_peer(rollout_fields, fake_peer, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    fake_peer(f"""test -z "$XLA_FLAGS$JAX_ENABLE_X64$PYTHONPATH" || exit 7
echo '{json.dumps(RESULT)}'""")
    assert os.environ["XLA_FLAGS"]
    assert api.run_peer("tunix", rollout_fields, timeout_s=30)["tok_s"] == 10.0


def test_failure_carries_the_end_of_the_error_output(rollout_fields, fake_peer):
    fake_peer("echo 'tunix: out of luck' >&2; exit 3")
    with pytest.raises(api.PeerError, match=r"exit code 3:\ntunix: out of luck"):
        api.run_peer("tunix", rollout_fields, timeout_s=30)


def test_peer_past_its_limit_is_ended_with_its_children(rollout_fields, fake_peer, tmp_path):
    fake_peer(f"sleep 300 & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(api.PeerError, match=r"past its limit of 1\.0 s"):
        api.run_peer("tunix", rollout_fields, timeout_s=1.0)
    pid = int((tmp_path / "pid").read_text())
    status = pathlib.Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_output_without_a_result_is_an_error(rollout_fields):
    checked = job.job_from_dict(rollout_fields)
    for output in ("", "done", json.dumps(RESULT | {"peer": "vllm"}), json.dumps(RESULT | {"kind": "train"})):
        with pytest.raises(api.PeerError, match="printed no result"):
            api.parse_result("tunix", checked, output)
    with pytest.raises(api.PeerError, match=r"lacks \['versions'\]"):
        api.parse_result("tunix", checked, json.dumps({k: v for k, v in RESULT.items() if k != "versions"}))


def test_measurement_counts_useful_tokens_and_slots(rollout_fields):
    checked = job.job_from_dict(rollout_fields | {"repeats": 3, "warmup": 2, "return_tokens": True})
    seeds = []

    def run_once(seed):
        seeds.append(seed)
        return harness.Generated(lengths=[4, 2], slot_tokens=8, token_ids=[[1] * 4, [2] * 2])

    result = harness.measure_rollout(checked, run_once)
    assert seeds == [0, 1, 2, 3, 4]
    assert (result["useful_tokens"], result["utilisation"]) == (6, 0.75)
    assert len(result["walls_s"]) == 3
    assert result["token_ids"] == [[1] * 4, [2] * 2]


def test_wrong_lengths_are_not_measured(rollout_fields):
    checked = job.job_from_dict(rollout_fields)
    with pytest.raises(RuntimeError, match="are not the lengths asked for"):
        harness.measure_rollout(checked, lambda seed: harness.Generated([4, 3], 8, [[], []]))


def test_train_measurement_reports_the_first_step(train_fields):
    losses = iter([0.5, 0.4, 0.3, 0.2])
    result = harness.measure_train(
        job.job_from_dict(train_fields | {"repeats": 2}), lambda: None, lambda: {"loss": next(losses)}
    )
    assert result["first_step"] == {"loss": 0.5}
    assert result["useful_tokens"] == 6
    assert next(losses, None) is None  # two warm-up steps and two timed ones


def test_rows_are_cut_to_their_length_or_first_stop(rollout_fields):
    checked = job.job_from_dict(rollout_fields | {"stop_token_ids": [7, 9]})
    assert harness.cut([1, 2, 3, 4, 5], checked, 0) == [1, 2, 3, 4]
    assert harness.cut([1, 9, 7, 4, 5], checked, 0) == [1, 9]
    assert harness.static_batches(job.job_from_dict(rollout_fields | {"batch_size": 1})) == [[0], [1]]


def test_more_threads_than_cpus_is_refused():
    with pytest.raises(ValueError, match="threads: got 100000"):
        harness.pin_threads(100_000)


def test_tiny_model_is_complete_and_seeded():
    tensors = make_tiny.make_tensors(make_tiny.TinySpec())
    assert sum(tensor.size for tensor in tensors.values()) == 6_033_664
    assert abs(float(tensors["model.layers.3.mlp.up_proj.weight"].std()) - 0.02) < 2e-4
    small = make_tiny.TinySpec(layers=1, hidden=8, ffn=16, heads=2, kv_heads=1, head_dim=4, vocab=32)
    first, again = make_tiny.make_tensors(small), make_tiny.make_tensors(small)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert first["model.layers.0.self_attn.k_proj.weight"].shape == (4, 8)
