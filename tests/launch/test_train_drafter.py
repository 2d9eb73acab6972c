"""The drafter's command: what it refuses, what it leaves, and that it goes on where it was."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from launch import convert, drafter_data, train_drafter
from tests import tiny_model
from tests.tiny_model import read_metrics, run_command, sections, write_config
from tlt_jax.checkpoint import CheckpointConfig, CheckpointStore
from tlt_jax.drafter.features import Recorded, make_reader
from tlt_jax.models.hf import load_hf
from tlt_jax.types import FeatureTrace

DRAFTER = {
    "preset": "coupled",
    "loss": {"num_steps": 2, "chunk_rows": 32},
    "draft_vocab_size": 24,
    "batch": {"row_len": 32, "context_len": 4, "num_rows": 2},
    "warmup": {
        "num_steps": 6,
        "eval_every": 3,
        "checkpoint_every": 2,
        "held_out": 4,
        "num_prompts": 6,
        "samples": 3,
        "optim": {"learning_rate": 3e-3},
    },
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tiny_model.make_files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def command(root, tmp_path, capfd, monkeypatch):
    """Runs the command over the tiny model; (exit code, result or None, stderr)."""
    tiny_model.share_programs(monkeypatch)

    def run(*argv, workdir="run", drafter=None, **changes):
        config = sections(root, drafter=DRAFTER | (drafter or {}), reward={"weights": {"number": 1.0}}, **changes)
        path = write_config(tmp_path / "tiny.py", config)
        arguments = (f"--config={path}", f"--workdir={tmp_path / workdir}", *argv)
        code, out, err = run_command(capfd, train_drafter.main, *arguments)
        return code, json.loads(out.splitlines()[-1]) if out else None, err

    return run


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "got no lines, expected one JSON object per line"),
        (["{"], "data.jsonl:1: "),
        (['{"prompt": "1"}', '{"text": "1"}'], 'data.jsonl:2: got {"text": "1"}, expected an object with one of'),
        (['{"prompt": "1", "answer": "2"}'], "data.jsonl:1: got unknown keys ['answer'], expected prompt, messages"),
        (['{"prompt": "1", "response": ""}'], "data.jsonl:1: got response '', expected non-empty text"),
        (['{"prompt": "1", "response_ids": [99]}'], "data.jsonl:1: got token ids 5..99, expected ids in [0, 56)"),
        (['{"prompt_ids": [5], "response_ids": "7"}'], "data.jsonl:1: got response_ids 7, expected a non-empty list"),
        ([json.dumps({"prompt": "1" * 40, "response": "2" * 40})], "got 81 tokens of prompt and response, expected at"),
    ],
)
def test_bad_data_is_refused_with_its_line(command, tmp_path, lines, message):
    """H1: exit code 2 and nothing left behind."""
    (tmp_path / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    code, out, err = command(f"--data={tmp_path / 'data.jsonl'}")
    assert (code, out) == (2, None) and message in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data=nowhere.jsonl"], "--data: got 'nowhere.jsonl', which is no file"),
        (["--config.drafter.warmup.num_stpes=3"], "unknown key; did you mean config.drafter.warmup.num_steps"),
        (["--config.drafter.draft_vocab_size=1"], "draft_vocab_size: got 1, expected 0 or 2 (the stop ids) to 50"),
        (["--config.drafter.path=nowhere"], "nowhere"),
        (["--config.drafter.form=eagle3", "--config.drafter.loss.feature_weight=0"], "set them for targets of less"),
        (["--config.drafter.warmup.eval_every=0"], "drafter.warmup.eval_every: got 0, expected >= 1"),
    ],
)
def test_bad_settings_are_refused(command, tmp_path, argv, message):
    code, out, err = command(*argv)
    assert (code, out) == (2, None) and message in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def files_of(workdir: pathlib.Path):
    return load_file(workdir / "drafter" / "model.safetensors")


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(command, tmp_path, caplog):
    """C7, C11, C14, F4: stopped after 4 of 6 steps, it ends with the same weights, data position and metrics; the map
    is that of the first start."""
    code, whole, err = command(workdir="whole")
    assert code == 0, err
    assert (whole["steps"], whole["stopped"]) == (6, "6 steps are done")
    assert command("--config.drafter.warmup.num_steps=4", workdir="cut")[1]["steps"] == 4
    with caplog.at_level("INFO", logger="absl"):
        code, resumed, err = command(workdir="cut")
    assert code == 0, err
    assert "restored step 4" in caplog.text
    kept = ("steps", "tokens", "accept_len", "best_step")
    assert {k: resumed[k] for k in kept} == {k: whole[k] for k in kept}
    for name, want in files_of(tmp_path / "whole").items():
        np.testing.assert_array_equal(files_of(tmp_path / "cut")[name], want)
    rows = [read_metrics(tmp_path / name) for name in ("whole", "cut")]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == [0, 3, 6]
    assert rows[0][-1]["drafter/tokens"] > rows[0][1]["drafter/tokens"] > 0
    assert {f"drafter/{name}/{k}" for name in ("accept", "top1", "top3") for k in range(1, 6)} <= rows[0][0].keys()
    assert all(1.0 <= row["drafter/accept_len"] <= 6.0 for row in rows[0])


def test_what_a_checkpoint_holds(command, tmp_path):
    """The trainable weights, their moments, the position and the map; no array with as many rows as the vocabulary."""
    assert command("--config.drafter.warmup.num_steps=2")[0] == 0
    store = CheckpointStore(tmp_path / "run" / "checkpoints", CheckpointConfig(), read_only=True)
    manifest = store.restore({}).manifest
    store.close()
    assert sorted(manifest["items"]) == ["d2t", "drafter", "progress"]
    arrays = manifest["items"]["drafter"]
    assert {name.split("/")[1] for name in arrays if name.startswith("params")} == {"fc", "layer"}
    assert not any(shape and shape[0] == 56 for shape in arrays.values())
    num = {k: sum(int(np.prod(s)) for n, s in arrays.items() if n.startswith(k)) for k in ("params", "")}
    assert 3 * num["params"] <= num[""] <= 3 * num["params"] + 8
    assert manifest["items"]["d2t"] == {"offsets": [24]}


def test_the_rollout_keeps_the_features(command, root, tmp_path):
    """Those of a plain forward, up to bf16, of four positions of the prompt and every one of the response."""
    assert command("--config.drafter.warmup.num_steps=1")[0] == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "data.jsonl").read_text().splitlines()]
    sequences = [
        Recorded(
            request_id=i,
            token_ids=np.asarray([*line["prompt_ids"], *line["response_ids"]], np.int32),
            prompt_len=len(line["prompt_ids"]),
        )
        for i, line in enumerate(lines)
    ]
    kept = drafter_data.Kept(len(lines), 4, 1 << 20)
    kept.load(tmp_path / "run" / "features.safetensors", sequences)
    model, params = load_hf(root / "model")
    plain = {t.request_id: t for t in make_reader(model, context_len=4)(params, sequences)}
    assert sorted(kept.traces) == sorted(plain) == list(range(18))
    for i, trace in kept.traces.items():
        assert trace.start == plain[i].start and len(trace.features) == len(plain[i].features)
        gap = np.asarray(trace.features, np.float32) - np.asarray(plain[i].features, np.float32)
        np.testing.assert_array_less(np.abs(gap), 2e-2)


def test_features_beyond_the_limit_are_read_again():
    features = np.ones((9, 8), jnp.bfloat16)
    trace = FeatureTrace(request_id=0, token_ids=np.arange(10, dtype=np.int32), prompt_len=4, features=features)
    kept = drafter_data.Kept(2, 1, 8 * 2 * 9)
    for i in range(2):
        kept.add(dataclasses.replace(trace, request_id=i))
    assert list(kept.traces) == [0] and (kept.traces[0].start, len(kept.traces[0].features)) == (2, 7)
    sequences = [Recorded(request_id=i, token_ids=trace.token_ids, prompt_len=4) for i in range(2)]
    asked = []
    read = kept.read_first(lambda missing: iter([asked.extend(s.request_id for s in missing)]))
    found = list(read(sequences))
    assert found[0] is kept.traces[0] and asked == [1]


@pytest.mark.slow
def test_given_responses_are_trained_on_and_missing_ones_written(command, tmp_path):
    data = [{"prompt": "01 plus 1?", "response": "two."}, {"messages": [{"role": "user", "content": "02 plus 1?"}]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in data))
    code, result, err = command(f"--data={tmp_path / 'data.jsonl'}", "--config.drafter.warmup.num_steps=1")
    assert code == 0, err
    lines = [json.loads(line) for line in (tmp_path / "run" / "data.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and len(lines[0]["response_ids"]) == 5 and lines[0]["response_ids"][-1] == 2
    assert len({tuple(line["prompt_ids"]) for line in lines[1:]}) == 1
    assert result["drafter"] == str(tmp_path / "run" / "drafter")


def test_a_trained_drafter_goes_out_and_in_again_to_the_bit(command, root, tmp_path, capfd):
    """F3, F4: by the command, for the other server and back; the map goes with it."""
    assert command("--config.drafter.warmup.num_steps=1")[0] == 0
    source = tmp_path / "run"
    for server in ("vllm", "sglang"):
        argv = ["drafter-export", str(source), f"--model={root / 'model'}", f"--out={tmp_path / server}"]
        assert convert.main([*argv, f"--server={server}"]) == 0
        source = tmp_path / server
    first, vllm, last = (
        load_file(p / "model.safetensors") for p in (tmp_path / "run" / "drafter", tmp_path / "vllm", source)
    )
    assert first.keys() == last.keys() and set(vllm) == set(first) - {"fc.bias"}
    for name, want in first.items():
        np.testing.assert_array_equal(last[name], want)
    maps = [np.load(p / "draft_vocab.npy") for p in (tmp_path / "run" / "drafter", source)]
    np.testing.assert_array_equal(*maps)
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["architectures"] == ["LlamaForCausalLMEagle"]
    argv = ["drafter-export", str(root / "model"), f"--model={root / 'model'}", f"--out={tmp_path / 'x'}"]
    assert convert.main(argv) == 2
    assert "expected a drafter of one" in capfd.readouterr().err


@pytest.mark.slow
def test_training_stops_early_where_nothing_is_gained(command):
    warmup = {**DRAFTER["warmup"], "num_steps": 50, "eval_every": 1, "patience": 2, "min_gain": 9.0}
    code, result, _ = command(drafter={"warmup": warmup})
    assert (code, result["steps"], result["best_step"]) == (0, 2, 0)
    assert result["stopped"] == "no better accept length in 2 evaluations"
