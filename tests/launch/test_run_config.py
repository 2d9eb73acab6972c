import json
import logging
import pathlib
import subprocess
import sys

import pytest
from absl.testing import flagsaver

from launch import cli
from launch.config import ConfigError, parse_flags, prepare_workdir, to_json
from launch.run_config import MAY_CHANGE, SCHEMA, make_run_config

ROOT = pathlib.Path(__file__).parents[2]
SECTIONS = {"model": {"path": "m"}, "task": {"path": "a.jsonl"}}


def _make(**sections):
    return make_run_config({**SECTIONS, **sections})


def test_a_preset_gives_the_defaults_of_the_algorithm_and_keys_change_them():
    run = _make(rl={"algorithm": "dapo", "clip_high": 0.3, "learning_rate": 1e-5, "num_steps": 7, "group_size": 4})
    assert (run.algorithm.aggregation, run.algorithm.clip_low, run.algorithm.clip_high) == ("token_mean", 0.2, 0.3)
    assert run.algorithm.dynamic_sampling is True
    assert (run.optimizer.learning_rate, run.loop.num_steps, run.loop.group_size) == (1e-5, 7, 4)
    assert _make().algorithm.kl_coef == 0.04


def test_a_drafters_preset_gives_the_defaults_of_its_loss_at_the_rollouts_temperature():
    run = _make(
        rollout={"temperature": 0.7},
        drafter={"preset": "hass", "loss": {"step_decay": 0.5}, "optim": {"learning_rate": 1e-3}, "enabled": True},
    )
    loss = run.drafter.loss
    assert (loss.num_steps, loss.step_decay, loss.logit_loss, loss.temperature) == (3, 0.5, "soft_ce", 0.7)
    assert (run.drafter.optim.learning_rate, run.drafter.optim.b2) == (1e-3, 0.95)
    assert _make().drafter.loss.logit_loss == "log_overlap" and not _make().drafter.enabled
    assert _make(rollout={"temperature": 0.0}).drafter.loss.temperature == 1.0
    assert _make(drafter={"loss": {"temperature": 0.9}}).drafter.loss.temperature == 0.9
    eagle3 = _make(drafter={"form": "eagle3", "preset": "eagle3"}).drafter
    assert (eagle3.loss.num_steps, eagle3.loss.feature_weight) == (7, 0.0)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rl": {"algorithm": "grpoo"}}, r"rl.algorithm: got 'grpoo', expected one of grpo, "),
        ({"rl": {"group_size": 3, "prompts_per_step": 5, "num_minibatches": 2}}, r"5 prompts x 3 .* = 15 rows for 2"),
        ({"rl": {"group_size": 1}}, r"rl.group_size: got 1 with advantage"),
        ({"rollout": {"top_p": 0.9}}, r"top_p"),
        ({"model": {}}, r"model.path: got '', expected a Hugging Face directory or a name"),
        ({"model": {"path": "m", "dtype": "int8"}}, r"model.dtype: got 'int8', expected 'float32' or 'bfloat16'"),
        ({"drafter": {"preset": "eagel"}}, r"drafter.loss: got preset 'eagel', expected one of eagle, hass"),
        ({"drafter": {"form": "eagle3"}}, r"drafter.loss.feature_weight: got 1.0 with form eagle3, expected 0"),
        ({"drafter": {"loss": {"num_stpes": 2}}}, r"drafter.loss.num_stpes: unknown key; did you mean .*num_steps"),
        ({"drafter": {"batch": {"num_rows": 0}}}, r"drafter.batch: got num_rows 0"),
        ({"rollout": {"num_workers": 0}}, r"rollout.num_workers: got 0, expected >= 1"),
        (
            {"rollout": {"temprature": 0.5}},
            r"config.rollout.temprature: unknown key; did you mean config.rollout.temper",
        ),
        ({"checkpoint": {"num_keep": True}}, r"config.checkpoint.num_keep: got True \(bool\), expected int"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_model_is_read(sections, message):
    """B2, H1: truncated sampling that the algorithm cannot correct for, groups that do not divide, names, types."""
    with pytest.raises(ConfigError, match=message):
        _make(**sections)


def test_a_workdir_of_another_config_is_refused_and_more_steps_are_not(tmp_path):
    """H1, H8: what changes the result may not differ; how long, how often and on what devices may."""
    prepare_workdir(tmp_path, to_json(_make()), may_change=MAY_CHANGE)
    longer = _make(rl={"num_steps": 200}, rollout={"max_live": 8, "num_workers": 2}, checkpoint={"every_steps": 1})
    assert prepare_workdir(tmp_path, to_json(longer), may_change=MAY_CHANGE) is True
    other = _make(rl={"learning_rate": 3e-6, "seed": 4}, rollout={"temperature": 0.7})
    with pytest.raises(ConfigError) as error:
        prepare_workdir(tmp_path, to_json(other), may_change=MAY_CHANGE)
    assert [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:-1]] == [
        "loop.seed",
        "optimizer.learning_rate",
        "sampling.temperature",
    ]


def test_the_command_line_reaches_the_dataclasses():
    argv = ["train", "--config=configs/quickstart.py", "--config.rl.num_steps=5", "--config.rollout.temperature", ".5"]
    with flagsaver.flagsaver():
        parse_flags(argv)
        run = cli.read_run_config()
    assert (run.loop.num_steps, run.sampling.temperature, run.task.dataset) == (5, 0.5, "chain_sum")


def test_a_typo_ends_a_command_with_exit_code_2_and_the_nearest_key():
    """H1."""
    argv = [sys.executable, "-m", "launch.train", "--config=configs/quickstart.py", "--config.rollout.temprature=.5"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    expected = "error: config.rollout.temprature: unknown key; did you mean config.rollout.temperature?"
    assert done.stderr.strip().splitlines()[-1] == expected
    assert done.stdout == ""


def test_a_result_is_the_last_line_of_stdout_and_a_file(tmp_path, capsys):
    cli.write_result({"seconds": 1.5}, str(tmp_path / "r.json"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"seconds": 1.5}
    assert json.loads((tmp_path / "r.json").read_text()) == {"seconds": 1.5}


def test_notes_of_the_checkpoint_library_are_left_out_of_the_log_and_its_warnings_are_not():
    def record(level, path):
        return logging.LogRecord("absl", level, path, 1, "text", None, None)

    library = "/x/site-packages/orbax/checkpoint/_src/path/atomicity.py"
    assert cli.is_for_the_user(record(logging.INFO, library)) is False
    assert cli.is_for_the_user(record(logging.WARNING, library)) is True
    assert cli.is_for_the_user(record(logging.INFO, "/x/tlt_jax/checkpoint.py")) is True


def test_no_two_dataclasses_of_a_section_share_a_field():
    names = {section: [f for cls in classes for f in cls.__dataclass_fields__] for section, classes in SCHEMA.items()}
    assert {section: len(fields) - len(set(fields)) for section, fields in names.items()} == dict.fromkeys(SCHEMA, 0)
