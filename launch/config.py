"""From a config file and the command line to frozen dataclasses.

Life of a configuration:
1. `parse_flags` (given to `absl.app.run`) turns every `--config.section.key=value` into an override, and parses the
   rest.
2. `load_config` runs `get_config()` of the file, which returns a ConfigDict of sections, and lays the overrides on top.
3. `build` turns one section into the dataclasses it sets. All defaults live there, so a file names what it changes, and
   the annotations there are the types that are checked.
4. `prepare_workdir` writes `config.json`, or compares it with the one of the run that is being resumed.

A schema maps each section to the dataclasses whose fields are its keys. A key that is in none of them, a value of
another type and a value that a dataclass refuses raise `ConfigError`, which `main` functions turn into exit code 2.
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import difflib
import importlib.util
import json
import pathlib
import re
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags

from tlt_jax import files

CONFIG = flags.DEFINE_string(
    "config", None, "Config file, e.g. configs/quickstart.py; --config.section.key=value overrides."
)
OVERRIDE = flags.DEFINE_multi_string("override", [], "section.key=value; --config.section.key=value is the same.")

Schema = Mapping[str, Sequence[type]]
_PREFIX = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)


class ConfigError(ValueError):
    """A configuration or an input that cannot be run. The message says got, expected and remedy."""


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the command line, for `app.run(main, flags_parser=parse_flags)`; bad flags exit with code 2."""
    try:
        return flags.FLAGS(as_override_flags(argv))
    except flags.Error as error:
        exit_with(error)


def exit_with(error: Exception, code: int = 2) -> typing.NoReturn:
    """Prints the error's message alone and ends the process."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


def as_override_flags(argv: Sequence[str]) -> list[str]:
    """Rewrites `--config.a.b=v`, `--config.a.b v`, `--config.a.b` and `--noconfig.a.b` as `--override=a.b=v`."""
    rewritten = []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        match = _PREFIX.fullmatch(arg)
        if match is None:
            rewritten.append(arg)
            continue
        is_negated, key, value = match.groups()
        if is_negated:
            value = "false"
        elif value is None:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        rewritten.append(f"--override={key}={value}")
    return rewritten


def load_config(path: str | None, overrides: Sequence[str], schema: Schema) -> dict[str, dict[str, Any]]:
    """Sections of the config file with the overrides laid on top, as plain dicts. Values are checked by `build`.

    Args:
      path: Python file that defines `get_config()`.
      overrides: each `section.key=value`; a key may go on into a nested dataclass or a mapping.
      schema: section -> dataclasses.

    Raises:
      ConfigError: no such file; a file that fails; an unknown section or key; a value that does not parse.
    """
    if path is None:
        raise ConfigError("config: got no --config, expected a file, e.g. --config=configs/quickstart.py")
    sections = _read_file(pathlib.Path(path))
    for name, section in sections.items():
        _check_key(name, schema, "config")
        if not isinstance(section, dict):
            raise ConfigError(f"config.{name}: got {section!r}, expected a section of keys")
        for key in section:
            _check_key(key, _annotations(schema[name]), f"config.{name}")
    for override in overrides:
        key, _, text = override.partition("=")
        section, *keys = key.split(".")
        _check_key(section, schema, "config")
        if not keys:
            raise ConfigError(
                f"config.{section}: got {text!r} for a whole section, expected --config.{section}.KEY=VALUE"
            )
        _set_text(sections.setdefault(section, {}), keys, text, _annotations(schema[section]), f"config.{section}")
    return sections


def build(section: Mapping[str, Any], path: str, *bases: Any) -> tuple[Any, ...]:
    """The dataclass instances that one section sets.

    Args:
      section: key -> value.
      path: how the section is called in messages, e.g. "config.rollout".
      *bases: dataclasses, or instances whose values stand in for the defaults (a preset).

    Returns:
      One instance for each base, in order.

    Raises:
      ConfigError: an unknown key (the nearest is named), a wrong type, or a value that the dataclass refuses.
    """
    known = _annotations(bases)
    for key in section:
        _check_key(key, known, path)
    return tuple(_build_one(base, section, path) for base in bases)


def from_section(cls: Any, section: Mapping[str, Any], path: str) -> Any:
    """`build` for a section that sets one dataclass."""
    return build(section, path, cls)[0]


def to_json(value: Any) -> Any:
    """Dataclasses, mappings and sequences as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(item) for item in value]
    return value


def prepare_workdir(
    workdir: pathlib.Path,
    resolved: Mapping[str, Any],
    *,
    fresh: bool = False,
    may_change: Collection[str] = (),
    is_writer: bool = True,
) -> bool:
    """Writes `config.json` into a new workdir, or checks that an existing one holds a run of the same configuration.

    Args:
      workdir: the run's directory; made if missing.
      resolved: section -> key -> value, every default filled in (`to_json`).
      fresh: insist on a new workdir.
      may_change: `section.key`, or `section` for all its keys, that a resumed run may set anew.
      is_writer: whether this process writes; the others only check.

    Returns:
      Whether a run is resumed.

    Raises:
      ConfigError: `fresh` and the workdir holds a run; or its configuration differs, each key listed.
    """
    path = workdir / "config.json"
    resumes = path.exists()
    if resumes and fresh:
        raise ConfigError(
            f"workdir: got {workdir} with a run in it and --fresh, expected a new one; name another --workdir"
        )
    if resumes:
        old, new = _flatten(json.loads(path.read_text())), _flatten(json.loads(json.dumps(resolved)))
        changed = [key for key in sorted({*old, *new}) if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
        refused = [key for key in changed if not any(key == m or key.startswith(f"{m}.") for m in may_change)]
        if refused:
            lines = [f"  {key}: the run has {old.get(key, _ABSENT)}, now {new.get(key, _ABSENT)}" for key in refused]
            raise ConfigError(
                f"workdir: {workdir} holds a run of another configuration:\n" + "\n".join(lines) + "\n"
                "put these values back to resume it, or name another --workdir to start a new run"
            )
    if is_writer:
        files.write_text(path, json.dumps(resolved, indent=2) + "\n")
    return resumes


_ABSENT = "nothing"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _read_file(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"config: got {str(path)!r}, expected a Python file that defines get_config(); there is none")
    spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _errors_of_the_file(path):
        spec.loader.exec_module(module)
        config = module.get_config()
    if not isinstance(config, ml_collections.ConfigDict):
        raise ConfigError(f"config: get_config() of {path} returned {type(config).__name__}, expected a ConfigDict")
    return config.to_dict()  # a copy: ConfigDict(other) would share nested sections with other


@contextlib.contextmanager
def _errors_of_the_file(path: pathlib.Path) -> Iterator[None]:
    """A locked ConfigDict raises AttributeError or KeyError at a typo, TypeError at a type; others are plain bugs."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        NameError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(f"config: {path} fails: {type(error).__name__}: {error}") from error


def _annotations(bases: Sequence[Any]) -> dict[str, Any]:
    """Field name -> type, over several dataclasses (or instances)."""
    known: dict[str, Any] = {}
    for base in bases:
        cls = base if isinstance(base, type) else type(base)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in known, f"{field.name} is a field of two dataclasses of one section"
            known[field.name] = hints[field.name]
    return known


def _check_key(key: str, known: Collection[str], path: str) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
        hint = f"did you mean {path}.{near[0]}?" if near else f"expected one of {', '.join(sorted(known))}"
        raise ConfigError(f"{path}.{key}: unknown key; {hint}")


def _build_one(base: Any, section: Mapping[str, Any], path: str) -> Any:
    cls = base if isinstance(base, type) else type(base)
    hints = typing.get_type_hints(cls)
    own = {}
    for field in dataclasses.fields(cls):
        if field.name in section:
            default = getattr(base, field.name, None)
            own[field.name] = _convert(hints[field.name], section[field.name], f"{path}.{field.name}", default)
    try:
        return cls(**own) if isinstance(base, type) else dataclasses.replace(base, **own)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _convert(hint: Any, value: Any, path: str, default: Any = None) -> Any:
    """`value` as the type `hint` says; ints become floats where a float is wanted, and nothing else is turned round."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(arg for arg in args if arg is not type(None)), value, path, default)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_section(default if dataclasses.is_dataclass(default) else hint, value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is hint:  # isinstance would take True for an int
        return value
    if origin in (collections.abc.Sequence, tuple, list) and isinstance(value, list | tuple):
        return _convert_items(args, value, path)
    if origin in (collections.abc.Mapping, dict) and isinstance(value, Mapping):
        return {str(key): _convert(args[1], item, f"{path}.{key}") for key, item in value.items()}
    name = getattr(hint, "__name__", None) if origin is None else str(hint).replace("collections.abc.", "")
    raise ConfigError(f"{path}: got {value!r} ({type(value).__name__}), expected {name}")


def _convert_items(args: tuple[Any, ...], value: Sequence[Any], path: str) -> tuple[Any, ...]:
    fixed = args[:-1] if args[-1] is Ellipsis else args
    if len(fixed) > 1 and len(fixed) != len(value):
        raise ConfigError(f"{path}: got {value!r}, expected {len(fixed)} items")
    items = fixed if len(fixed) > 1 else fixed * len(value)
    return tuple(_convert(hint, item, f"{path}[{i}]") for i, (hint, item) in enumerate(zip(items, value, strict=True)))


def _set_text(section: dict[str, Any], keys: list[str], text: str, known: Mapping[str, Any], path: str) -> None:
    """Puts the text of an override where `keys` lead, parsed as the type found there."""
    key, *rest = keys
    _check_key(key, known, path)
    hint = known[key]
    if not rest:
        section[key] = _parse(hint, text, f"{path}.{key}")
        return
    inner = section.setdefault(key, {})
    if dataclasses.is_dataclass(hint):
        _set_text(inner, rest, text, _annotations([hint]), f"{path}.{key}")
    elif typing.get_origin(hint) in (collections.abc.Mapping, dict):
        inner[".".join(rest)] = _parse(typing.get_args(hint)[1], text, f"{path}.{'.'.join(keys)}")
    else:
        raise ConfigError(f"{path}.{'.'.join(keys)}: unknown key; {path}.{key} has no keys of its own")


def _parse(hint: Any, text: str, path: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if hint is str:
        return text
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if hint is float:
        with contextlib.suppress(ValueError):
            return float(text)  # takes inf and 1e-6, which a literal may not be
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError) as error:
        if hint is Any:
            return text
        raise ConfigError(f"{path}: got {text!r}, expected {getattr(hint, '__name__', hint)}") from error
