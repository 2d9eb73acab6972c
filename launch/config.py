"""From ConfigDict sections to frozen dataclasses, and back to a ConfigDict of all defaults.

Life of a configuration:
1. `defaults(sections)` lays the defaults of the dataclasses out as one locked ConfigDict, so that a config file and the
   command line may change any field and name no other. Defaults live in the dataclasses alone.
2. `from_sections` turns a section into the dataclasses it sets, and refuses an unknown key, naming the nearest, or a
   value of another type: ConfigDict lets a bool into an int field, and anything into a field that is None.
3. `prepare_workdir` writes the resolved configuration as `config.json`, or compares it with the one of the run that
   is resumed.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import json
import pathlib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import ml_collections

from tlt_jax import files

T = TypeVar("T")
_ABSENT = "nothing"  # stands for the value of a key that one of two configurations lacks


def defaults(sections: Mapping[str, Sequence[type]]) -> ml_collections.ConfigDict:
    """A locked ConfigDict: section name -> the default of every field of the section's dataclasses."""
    config = ml_collections.ConfigDict()
    for name, classes in sections.items():
        _annotations(classes)
        config[name] = ml_collections.ConfigDict({k: v for cls in classes for k, v in _field_defaults(cls).items()})
    return config.lock()


def from_section(cls: type[T], section: Mapping[str, Any], path: str) -> T:
    """`from_sections` for a section that sets one dataclass."""
    return from_sections([cls], section, path)[0]


def from_sections(classes: Sequence[type], section: Mapping[str, Any], path: str) -> list[Any]:
    """The dataclass instances that one section sets.

    Args:
      classes: dataclasses that share no field name.
      section: key -> value; keys left out take the dataclass's default.
      path: how the section is called in messages.

    Returns:
      One instance per class, in order.

    Raises:
      ValueError: an unknown key, a value of another type, or one that a dataclass refuses; names `path.key`.
    """
    hints = _annotations(classes)
    for key in section:
        if key not in hints:
            raise ValueError(f"{path}.{key}: got an unknown key{nearest(key, list(hints))}")
    values = {key: _convert(value, hints[key], f"{path}.{key}") for key, value in section.items()}
    return [cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}) for cls in classes]


def nearest(key: str, known: Sequence[str]) -> str:
    """'; the nearest known key is ...', or a list of the known keys where none is near."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"; the nearest known key is {close[0]!r}" if close else f"; known keys: {', '.join(sorted(known))}"


def to_json(value: Any) -> Any:
    """A dataclass tree as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
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
      resolved: the whole configuration, every default filled in (`to_json`).
      fresh: insist on a workdir without a run.
      may_change: dotted keys that a resumed run may set anew; one that ends in a dot stands for all below it.
      is_writer: whether this process writes; the others only check.

    Returns:
      Whether a run is resumed.

    Raises:
      ValueError: `fresh` and the workdir holds a run; or its configuration differs, each key listed.
    """
    path = workdir / "config.json"
    resumes = path.exists()
    if resumes and fresh:
        raise ValueError(f"workdir: got {workdir}, which holds a run, with --fresh; name a new --workdir")
    if resumes:
        old, new = _flatten(json.loads(path.read_text())), _flatten(json.loads(json.dumps(resolved)))
        pairs = {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in sorted(old.keys() | new.keys())}
        lines = [
            f"  {key}: the run has {before!r}, now {after!r}"
            for key, (before, after) in pairs.items()
            if before != after and not _is_listed(key, may_change)
        ]
        if lines:
            raise ValueError(
                f"workdir: {workdir} holds a run of another configuration:\n" + "\n".join(lines) + "\n"
                "put these values back to resume it, or name another --workdir to start a new run"
            )
    if is_writer:
        files.write_text(path, json.dumps(resolved, indent=2) + "\n")
    return resumes


def _is_listed(key: str, keys: Collection[str]) -> bool:
    return any(key.startswith(listed) if listed.endswith(".") else key == listed for listed in keys)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _annotations(classes: Sequence[type]) -> dict[str, Any]:
    """Field name -> type, over the dataclasses of one section."""
    known: dict[str, Any] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in known, f"{field.name} is a field of two dataclasses of one section"
            known[field.name] = hints[field.name]
    return known


def _field_defaults(cls: type) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            value = field.default
        else:
            assert field.default_factory is not dataclasses.MISSING, f"{cls.__name__}.{field.name} needs a default"
            value = field.default_factory()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        values[field.name] = dict(value) if isinstance(value, Mapping) else value
    return values


def _convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the annotated type; only lossless changes (int to float, list to tuple)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), path)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_section(hint, value, path)
    if hint in (int, float, str, bool) and type(value) is hint:  # isinstance would take True for an int
        return value
    if hint is float and type(value) is int:
        return float(value)
    if origin in (tuple, list, collections.abc.Sequence) and isinstance(value, list | tuple):
        return _convert_items(value, args, path)
    if origin in (dict, collections.abc.Mapping) and isinstance(value, Mapping):
        return {str(k): _convert(v, args[1], f"{path}.{k}") for k, v in value.items()}
    name = getattr(hint, "__name__", None) if origin is None else str(hint).replace("collections.abc.", "")
    raise ValueError(f"{path}: got {value!r} ({type(value).__name__}), expected {name}")


def _convert_items(value: Sequence[Any], args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """Items of `tuple[A, B]` one by one, items of `tuple[A, ...]` and `Sequence[A]` alike."""
    is_fixed = len(args) > 1 and args[-1] is not Ellipsis
    if is_fixed and len(args) != len(value):
        raise ValueError(f"{path}: got {value!r}, expected {len(args)} items")
    hints = args if is_fixed else args[:1] * len(value)
    return tuple(_convert(v, hint, f"{path}[{i}]") for i, (v, hint) in enumerate(zip(value, hints, strict=True)))
