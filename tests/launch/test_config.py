import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from launch import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pack:
    width: int = 64
    ratio: float = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    max_live: int = 16
    cache: str = ""
    is_pinned: bool = False
    pack: Pack = Pack(width=32)
    limit: int | None = None

    def __post_init__(self):
        if self.max_live < 1:
            raise ValueError(f"rollout.max_live: got {self.max_live}, expected >= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: float = 1.0
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    path: str = ""
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"math": 1.0})
    shots: Sequence[tuple[str, str]] = ()


SECTIONS = {"rollout": (Engine, Sampling), "task": (Task,)}


def test_defaults_of_the_dataclasses_go_round():
    laid_out = config.defaults(SECTIONS)
    assert laid_out.to_dict() == {
        "rollout": {
            "max_live": 16,
            "cache": "",
            "is_pinned": False,
            "pack": {"width": 32, "ratio": 2.0},
            "limit": None,
            "temperature": 1.0,
            "stop": (),
        },
        "task": {"path": "", "params": {}, "weights": {"math": 1.0}, "shots": ()},
    }
    assert config.from_sections(SECTIONS["rollout"], laid_out.rollout.to_dict(), "rollout") == [Engine(), Sampling()]
    assert config.from_section(Task, laid_out.task.to_dict(), "task") == Task()


def test_two_configs_share_nothing():
    """H1: `ConfigDict(c)` shares nested dicts with c; each call here makes its own."""
    first, second = config.defaults(SECTIONS), config.defaults(SECTIONS)
    first.rollout.pack.width = 1
    first.task.weights.math = 3.0
    assert (second.rollout.pack.width, second.task.weights.math, Task().weights["math"]) == (32, 1.0, 1.0)


def test_the_whole_config_is_locked():
    """H1: an unlocked top level would take a typo."""
    laid_out = config.defaults(SECTIONS)
    for section, key in ((laid_out, "rolout"), (laid_out.rollout, "temprature"), (laid_out.rollout.pack, "widht")):
        with pytest.raises(AttributeError, match=f'instead of "{key}"'):
            setattr(section, key, 1)


def test_values_become_the_annotated_types():
    section = {"max_live": 2, "temperature": 1, "pack": {"width": 8}, "stop": ["a", "b"], "limit": 3}
    assert config.from_sections(SECTIONS["rollout"], section, "rollout") == [
        Engine(max_live=2, pack=Pack(width=8), limit=3),
        Sampling(temperature=1.0, stop=("a", "b")),
    ]
    section = {"params": {"min": 2, "kind": "sum"}, "weights": {"math": 1}, "shots": [["q", "a"]]}
    task = config.from_section(Task, section, "task")
    assert task == Task(params={"min": 2, "kind": "sum"}, weights={"math": 1.0}, shots=(("q", "a"),))
    assert isinstance(task.weights["math"], float)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"temprature": 0.5}, r"rollout.temprature: got an unknown key; the nearest known key is 'temperature'"),
        ({"zzz": 1}, r"rollout.zzz: got an unknown key; known keys: cache, is_pinned, limit, max_live, pack, stop"),
        ({"pack": {"widht": 1}}, r"rollout.pack.widht: got an unknown key; the nearest known key is 'width'"),
        ({"max_live": True}, r"rollout.max_live: got True \(bool\), expected int"),
        ({"max_live": 2.0}, r"rollout.max_live: got 2.0 \(float\), expected int"),
        ({"max_live": None}, r"rollout.max_live: got None \(NoneType\), expected int"),
        ({"max_live": "4"}, r"rollout.max_live: got '4' \(str\), expected int"),
        ({"is_pinned": 1}, r"rollout.is_pinned: got 1 \(int\), expected bool"),
        ({"temperature": True}, r"rollout.temperature: got True \(bool\), expected float"),
        ({"cache": 5}, r"rollout.cache: got 5 \(int\), expected str"),
        ({"limit": "a"}, r"rollout.limit: got 'a' \(str\), expected int"),
        ({"pack": 3}, r"rollout.pack: got 3 \(int\), expected Pack"),
        ({"pack": {"width": "a"}}, r"rollout.pack.width: got 'a' \(str\), expected int"),
        ({"stop": "abc"}, r"rollout.stop: got 'abc' \(str\), expected tuple\[str, ...\]"),
        ({"stop": (1,)}, r"rollout.stop\[0\]: got 1 \(int\), expected str"),
        ({"max_live": 0}, r"rollout.max_live: got 0, expected >= 1"),
    ],
)
def test_an_unknown_key_or_another_type_says_got_and_expected(section, message):
    """H1: typos in a plain dict; `bool` passes for an int, and None for anything, in a ConfigDict."""
    with pytest.raises(ValueError, match=message):
        config.from_sections(SECTIONS["rollout"], section, "rollout")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"weights": {"math": "x"}}, r"task.weights.math: got 'x' \(str\), expected float"),
        ({"shots": [("a",)]}, r"task.shots\[0\]: got \('a',\), expected 2 items"),
        ({"params": 3}, r"task.params: got 3 \(int\), expected Mapping\[str, typing.Any\]"),
    ],
)
def test_items_of_containers_are_checked(section, message):
    with pytest.raises(ValueError, match=message):
        config.from_section(Task, section, "task")


RESOLVED = {"rollout": config.to_json(Engine()), "task": config.to_json(Task(path="a", shots=(("a", "b"),)))}


def test_the_resolved_configuration_is_written_with_every_default(tmp_path):
    assert config.prepare_workdir(tmp_path / "run", RESOLVED) is False
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {
        "rollout": {
            "max_live": 16,
            "cache": "",
            "is_pinned": False,
            "pack": {"width": 32, "ratio": 2.0},
            "limit": None,
        },
        "task": {"path": "a", "params": {}, "weights": {"math": 1.0}, "shots": [["a", "b"]]},
    }
    assert config.prepare_workdir(tmp_path / "run", RESOLVED) is True


def test_a_workdir_of_another_configuration_is_refused_with_the_keys(tmp_path):
    config.prepare_workdir(tmp_path, RESOLVED)
    other = {**RESOLVED, "rollout": config.to_json(Engine(max_live=8, pack=Pack(width=16)))}
    with pytest.raises(ValueError, match="holds a run of another configuration") as error:
        config.prepare_workdir(tmp_path, other, may_change=("rollout.pack.", "rollout.max"))
    assert str(error.value) == (
        f"workdir: {tmp_path} holds a run of another configuration:\n"
        "  rollout.max_live: the run has 16, now 8\n"
        "put these values back to resume it, or name another --workdir to start a new run"
    )
    assert json.loads((tmp_path / "config.json").read_text()) == RESOLVED


def test_keys_that_are_safe_to_change_are_taken_over_on_resume(tmp_path):
    config.prepare_workdir(tmp_path, RESOLVED)
    other = {**RESOLVED, "task": config.to_json(Task(path="b"))}
    assert config.prepare_workdir(tmp_path, other, may_change=("task.",), is_writer=False) is True
    assert json.loads((tmp_path / "config.json").read_text()) == RESOLVED
    assert config.prepare_workdir(tmp_path, other, may_change=("task.path", "task.shots")) is True
    assert json.loads((tmp_path / "config.json").read_text()) == other


def test_fresh_refuses_a_workdir_with_a_run(tmp_path):
    assert config.prepare_workdir(tmp_path, RESOLVED, fresh=True) is False
    with pytest.raises(ValueError, match="which holds a run, with --fresh; name a new --workdir"):
        config.prepare_workdir(tmp_path, RESOLVED, fresh=True)


COMMAND = """
import dataclasses
from launch import cli, config

@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    temperature: float = 1.0
    max_live: int = 16

SECTIONS = {"rollout": (Rollout,)}
HOLDER = cli.define_config()

def main():
    section = cli.read_config(HOLDER)["rollout"].to_dict()
    with cli.checking_input():
        rollout = config.from_section(Rollout, section, "rollout")
    return config.to_json(rollout)

if __name__ == "__main__":
    cli.run(main)
"""

FILE = """
import importlib.util
spec = importlib.util.spec_from_file_location("command", {command!r})
command = importlib.util.module_from_spec(spec)
spec.loader.exec_module(command)

def get_config():
    config = command.config.defaults(command.SECTIONS)
    {line}
    return config
"""


def _run(tmp_path, line, *args):
    command, file = tmp_path / "command.py", tmp_path / "file.py"
    command.write_text(COMMAND.replace("HOLDER = cli.define_config()", "HOLDER = None"))
    file.write_text(FILE.format(command=str(command), line=line))
    main = tmp_path / "main.py"
    main.write_text(COMMAND)
    root = pathlib.Path(__file__).parents[2]
    argv = [sys.executable, str(main), f"--config={file}", *args]
    return subprocess.run(argv, capture_output=True, text=True, cwd=root, env={"PYTHONPATH": str(root)}, timeout=60)


def test_a_command_takes_values_from_the_file_and_the_command_line(tmp_path):
    done = _run(tmp_path, "config.rollout.max_live = 4", "--config.rollout.temperature=.5")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"temperature": 0.5, "max_live": 4}


@pytest.mark.parametrize(
    ("line", "args", "message"),
    [
        ("", ["--config.rollout.temprature=.5"], "unknown key 'temprature'; the nearest known key is 'temperature'"),
        ("config.rollout.temprature = 0.5", [], "unknown key 'temprature'; the nearest known key is 'temperature'"),
        ("config.rolout = {}", [], "unknown key 'rolout'; the nearest known key is 'rollout'"),
        ("config.rollout.max_live = True", [], "rollout.max_live: got True (bool), expected int"),
        ("", ["--config.rollout.max_live=many"], "many"),
        ("", ["--confg=x"], "Unknown command line flag 'confg'"),
    ],
)
def test_a_bad_key_or_value_ends_a_command_with_exit_code_2(tmp_path, line, args, message):
    """H1: on the command line and in the file."""
    done = _run(tmp_path, line or "pass", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
