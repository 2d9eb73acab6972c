"""Evaluation of a run, of a model directory, and of the config's model."""

import json

import pytest

from launch import convert, evaluate
from launch.config import to_json
from tests import tiny_model
from tests.tiny_model import LocalRewards, read_metrics, run_command, run_loop, sections, write_config


def digits(text, reference):
    return sum(c.isdigit() for c in text) / max(len(text), 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The files, and in `run` two steps of training."""
    root = tiny_model.make_files(tmp_path_factory.mktemp("tiny"))
    config = sections(root, eval={"every": 1}, rl={"num_steps": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        write_config(root / "tiny.py", config)
        run_loop(config, root / "run", LocalRewards(digits))
        run = tiny_model.run_config.make_run_config(config)
        (root / "run" / "config.json").write_text(json.dumps(to_json(run)))
        yield root


@pytest.fixture
def command(root, capfd, monkeypatch):
    tiny_model.share_programs(monkeypatch)

    def run(*argv):
        code, out, err = run_command(capfd, evaluate.main, f"--config={root / 'tiny.py'}", *argv)
        assert "Traceback" not in err
        return code, json.loads(out.splitlines()[-1]) if out else None, err

    return run


def evals(metrics):
    return {k: v for k, v in metrics.items() if k.startswith("eval/")}


def test_the_same_numbers_as_the_run_itself(command, root, tmp_path):
    """C13: the config's model is step 0; the workdir's checkpoints are steps 1 and 2; so is what is exported."""
    by_step = {row["step"]: evals(row) for row in read_metrics(root / "run")}
    assert len(by_step[0]) >= 5 and by_step[0] != by_step[2]
    code, result, _ = command()
    assert (code, result["step"], result["k"], evals(result)) == (0, 0, 1, by_step[0])
    code, result, _ = command(f"--checkpoint={root / 'run'}")
    assert (code, result["step"], evals(result)) == (0, 2, by_step[2])
    assert convert.main(["hf-export", str(root / "run"), "--out", str(tmp_path / "exported")]) == 0
    code, result, _ = command(f"--checkpoint={tmp_path / 'exported'}")
    assert (code, result["step"], evals(result)) == (0, 0, by_step[2])
    code, result, _ = command(f"--checkpoint={root / 'run'}", "--step=1")
    assert (code, result["step"], evals(result)) == (0, 1, by_step[1])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--checkpoint=nowhere"], "--checkpoint: got nowhere, which is no directory"),
        (["--checkpoint={root}"], "holds no complete checkpoint; expected the workdir of a run"),
        (["--checkpoint={root}/run", "--step=9"], "checkpoint: got step 9, expected one of [1, 2]"),
        (["--step=1"], "--step: got 1 without the workdir of a run"),
        (["--config.task.eval_size=0"], "task.eval_size: got 0 held-out prompts"),
        (["--config.eval.num_samples=2"], "eval.temperature: got 0.0, expected > 0 with more than one sample"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(command, root, argv, message):
    code, result, err = command(*(a.format(root=root) for a in argv))
    assert (code, result) == (2, None) and message in err
