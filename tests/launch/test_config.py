import dataclasses
import json
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import pytest
from absl import flags

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
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shots: Sequence[tuple[str, str]] = ()


SCHEMA = {"rollout": (Engine, Sampling), "task": (Task,)}


def _load(tmp_path, body, *overrides, schema=SCHEMA):
    path = tmp_path / "some_config.py"
    path.write_text("import ml_collections\n\ndef get_config():\n" + textwrap.indent(textwrap.dedent(body), "    "))
    return config.load_config(str(path), overrides, schema)


BASE = """
config = ml_collections.ConfigDict({"rollout": {"max_live": 4}, "task": {"path": "a.jsonl"}})
config.lock()
return config
"""


def _build(sections):
    return {name: config.build(sections.get(name, {}), f"config.{name}", *SCHEMA[name]) for name in SCHEMA}


def test_a_file_names_what_it_changes_and_the_rest_are_the_dataclass_defaults(tmp_path):
    built = _build(_load(tmp_path, BASE))
    assert built["rollout"] == (Engine(max_live=4), Sampling())
    assert built["task"] == (Task(path="a.jsonl"),)


def test_overrides_are_typed_by_the_dataclasses(tmp_path):
    sections = _load(
        tmp_path,
        BASE,
        "rollout.temperature=5e-1",
        "rollout.cache=123",
        "rollout.is_pinned=true",
        "rollout.pack.width=8",
        "rollout.limit=none",
        'rollout.stop=("</answer>", "x")',
        "task.params.min_terms=2",
        "task.params.kind=sum",
        "task.weights={'math': 1, 'format': 0.5}",
        "task.weights.user:f=2",
        "task.shots=[['a', 'b']]",
    )
    built = _build(sections)
    assert built["rollout"] == (
        Engine(max_live=4, cache="123", is_pinned=True, pack=Pack(width=8, ratio=2.0)),
        Sampling(temperature=0.5, stop=("</answer>", "x")),
    )
    assert built["task"] == (
        Task(
            path="a.jsonl",
            params={"min_terms": 2, "kind": "sum"},
            weights={"math": 1.0, "format": 0.5, "user:f": 2.0},
            shots=(("a", "b"),),
        ),
    )


def test_the_default_instance_of_a_nested_section_keeps_its_other_values(tmp_path):
    (engine, _) = _build(_load(tmp_path, BASE, "rollout.pack.ratio=3"))["rollout"]
    assert engine.pack == Pack(width=32, ratio=3.0)


def test_a_preset_stands_in_for_the_defaults():
    (built,) = config.build({"cache": "b"}, "config.rollout", Engine(max_live=2, cache="a", is_pinned=True))
    assert built == Engine(max_live=2, cache="b", is_pinned=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temprature=.5", r"config.rollout.temprature: unknown key; did you mean config.rollout.temperature\?"),
        ("rolout.temperature=.5", r"config.rolout: unknown key; did you mean config.rollout\?"),
        ("rollout.pack.widht=5", r"config.rollout.pack.widht: unknown key; did you mean config.rollout.pack.width\?"),
        (
            "rollout.zzz=5",
            r"config.rollout.zzz: unknown key; expected one of cache, is_pinned, limit, max_live, pack, ",
        ),
        (
            "rollout.max_live.x=5",
            r"config.rollout.max_live.x: unknown key; config.rollout.max_live has no keys of its own",
        ),
        ("rollout=5", r"config.rollout: got '5' for a whole section"),
        ("rollout.max_live=many", r"config.rollout.max_live: got 'many', expected int"),
    ],
)
def test_a_typo_on_the_command_line_names_the_nearest_key(tmp_path, override, message):
    """H1: never a run with defaults in place of what was asked for."""
    with pytest.raises(config.ConfigError, match=message):
        _load(tmp_path, BASE, override)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "config.rollout.temprature = 0.5",
            r"config.rollout.temprature: unknown key; did you mean config.rollout.temperature",
        ),
        ("config.rolout = {'max_live': 3}", r"config.rolout: unknown key; did you mean config.rollout"),
        ("return ml_collections.ConfigDict({'rollout': 3})", r"config.rollout: got 3, expected a section of keys"),
        ("config.update({'task': {'pth': 'x'}})", r"config.task.pth: unknown key; did you mean config.task.path"),
        ("config.lock(); config.rollout.max_liv = 3", r"some_config.py fails: AttributeError: .*max_liv"),
        ("config.lock(); config.rollout.max_live = 'a'", r"some_config.py fails: TypeError"),
        ("undefined_name", r"some_config.py fails: NameError: name 'undefined_name' is not defined"),
        ("return {'rollout': {}}", r"returned dict, expected a ConfigDict"),
        ("return", r"returned NoneType, expected a ConfigDict"),
    ],
)
def test_a_typo_in_the_file_is_an_error(tmp_path, line, message):
    """H1: an unlocked ConfigDict takes any key; the dataclasses do not."""
    body = f"""
    config = ml_collections.ConfigDict({{"rollout": {{"max_live": 4}}, "task": {{"path": ""}}}})
    {line}
    return config
    """
    with pytest.raises(config.ConfigError, match=message):
        _load(tmp_path, body)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("rollout", "max_live", True, r"config.rollout.max_live: got True \(bool\), expected int"),
        ("rollout", "max_live", 2.0, r"got 2.0 \(float\), expected int"),
        ("rollout", "max_live", None, r"got None \(NoneType\), expected int"),
        ("rollout", "max_live", "4", r"got '4' \(str\), expected int"),
        ("rollout", "is_pinned", 1, r"got 1 \(int\), expected bool"),
        ("rollout", "temperature", True, r"got True \(bool\), expected float"),
        ("rollout", "cache", 5, r"got 5 \(int\), expected str"),
        ("rollout", "limit", "a", r"got 'a' \(str\), expected int"),
        ("rollout", "pack", 3, r"config.rollout.pack: got 3 \(int\), expected Pack"),
        ("rollout", "pack", {"width": "a"}, r"config.rollout.pack.width: got 'a' \(str\), expected int"),
        ("rollout", "stop", "abc", r"config.rollout.stop: got 'abc' \(str\), expected tuple\[str, ...\]"),
        ("rollout", "stop", (1,), r"config.rollout.stop\[0\]: got 1 \(int\), expected str"),
        ("task", "weights", {"math": "x"}, r"config.task.weights.math: got 'x' \(str\), expected float"),
        ("task", "shots", [("a",)], r"config.task.shots\[0\]: got \('a',\), expected 2 items"),
        ("rollout", "max_live", 0, r"config.rollout: rollout.max_live: got 0, expected >= 1"),
    ],
)
def test_a_value_of_another_type_says_got_and_expected(section, key, value, message):
    """H1: `bool` passes for an int, and None for anything, in a ConfigDict."""
    with pytest.raises(config.ConfigError, match=message):
        config.build({key: value}, f"config.{section}", *SCHEMA[section])


def test_a_section_taken_from_another_config_is_not_shared_with_it(tmp_path, monkeypatch):
    """H1: `ConfigDict(c)` shares nested dicts with c; sections that were read are copies."""
    shared = types.ModuleType("shared_config")
    shared.config = ml_collections.ConfigDict({"rollout": {"max_live": 4}})
    monkeypatch.setitem(sys.modules, "shared_config", shared)
    body = "import shared_config\nreturn ml_collections.ConfigDict(shared_config.config)"
    assert _load(tmp_path, body, "rollout.max_live=8")["rollout"]["max_live"] == 8
    assert shared.config.rollout.max_live == 4


def test_a_missing_file_is_named():
    with pytest.raises(config.ConfigError, match=r"got 'configs/nowhere\.py', expected a Python file"):
        config.load_config("configs/nowhere.py", (), SCHEMA)
    with pytest.raises(config.ConfigError, match="got no --config"):
        config.load_config(None, (), SCHEMA)


def test_command_line_forms_become_overrides():
    argv = ["train", "--config=a.py", "--config.a.b=c=d", "--config.a.c", "1", "--config.a.d", "--noconfig.a.e", "--x"]
    overrides = ["--override=a.b=c=d", "--override=a.c=1", "--override=a.d=true", "--override=a.e=false"]
    assert config.as_override_flags(argv) == ["train", "--config=a.py", *overrides, "--x"]


def test_an_unknown_flag_ends_with_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        config.parse_flags(["train", "--confg=a.py"])
    assert stopped.value.code == 2
    assert "Unknown command line flag 'confg'. Did you mean: config" in capsys.readouterr().err
    flags.FLAGS.unparse_flags()


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
        "task": {"path": "a", "params": {}, "weights": {}, "shots": [["a", "b"]]},
    }
    assert config.prepare_workdir(tmp_path / "run", RESOLVED) is True


def test_a_workdir_of_another_configuration_is_refused_with_the_keys(tmp_path):
    config.prepare_workdir(tmp_path, RESOLVED)
    other = {**RESOLVED, "rollout": config.to_json(Engine(max_live=8, pack=Pack(width=16)))}
    with pytest.raises(config.ConfigError) as error:
        config.prepare_workdir(tmp_path, other, may_change=("rollout.pack",))
    assert str(error.value) == (
        f"workdir: {tmp_path} holds a run of another configuration:\n"
        "  rollout.max_live: the run has 16, now 8\n"
        "put these values back to resume it, or name another --workdir to start a new run"
    )
    assert json.loads((tmp_path / "config.json").read_text()) == RESOLVED


def test_keys_that_are_safe_to_change_are_taken_over_on_resume(tmp_path):
    config.prepare_workdir(tmp_path, RESOLVED)
    other = {**RESOLVED, "task": config.to_json(Task(path="b"))}
    assert config.prepare_workdir(tmp_path, other, may_change=("task",), is_writer=False) is True
    assert json.loads((tmp_path / "config.json").read_text()) == RESOLVED
    assert config.prepare_workdir(tmp_path, other, may_change=("task",)) is True
    assert json.loads((tmp_path / "config.json").read_text()) == other


def test_fresh_refuses_a_workdir_with_a_run(tmp_path):
    assert config.prepare_workdir(tmp_path, RESOLVED, fresh=True) is False
    with pytest.raises(config.ConfigError, match="with a run in it and --fresh, expected a new one"):
        config.prepare_workdir(tmp_path, RESOLVED, fresh=True)
