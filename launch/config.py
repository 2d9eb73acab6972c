"""From ConfigDict sections to frozen dataclasses, and back to a ConfigDict of all defaults.

Defaults live in the dataclasses alone. `defaults(sections)` lays them out as one locked ConfigDict, so that a config file
and the command line may change any field and name no other; `from_section` turns a section into its dataclass again and
refuses an unknown key (naming the nearest), or a value of another type (ConfigDict lets a bool into an int field, and
anything into a field that is None).
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import ml_collections

T = TypeVar("T")


def defaults(sections: Mapping[str, Sequence[type]]) -> ml_collections.ConfigDict:
    """A locked ConfigDict: section name -> the default of every field of the section's dataclasses."""
    config = ml_collections.ConfigDict()
    for name, classes in sections.items():
        values: dict[str, Any] = {}
        for cls in classes:
            values |= _field_defaults(cls)
        config[name] = ml_collections.ConfigDict(values)
    return config.lock()


def _field_defaults(cls: type) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            raise TypeError(f"{cls.__name__}.{field.name} has no default; a section's fields all need one")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = _field_defaults(type(value))
        values[field.name] = dict(value) if isinstance(value, Mapping) else value
    return values


def from_section(cls: type[T], section: Mapping[str, Any], path: str) -> T:
    """`cls(**section)`, checked.

    Raises:
      ValueError: an unknown key, a value of another type, or one that `cls` itself refuses; names `path.key`.
    """
    return from_sections([cls], section, path)[0]


def from_sections(classes: Sequence[type], section: Mapping[str, Any], path: str) -> list[Any]:
    """As `from_section` for a section whose keys are shared out among several dataclasses."""
    section = dict(section)
    known = [f.name for cls in classes for f in dataclasses.fields(cls)]
    for key in section:
        if key not in known:
            raise ValueError(f"{path}.{key}: got an unknown key{nearest(key, known)}")
    made = []
    for cls in classes:
        hints = typing.get_type_hints(cls)
        names = [f.name for f in dataclasses.fields(cls) if f.name in section]
        made.append(cls(**{name: _convert(section[name], hints[name], f"{path}.{name}") for name in names}))
    return made


def nearest(key: str, known: Sequence[str]) -> str:
    """'; the nearest known key is ...', or a list of the known keys where none is near."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"; the nearest known key is {close[0]!r}" if close else f"; known keys: {', '.join(sorted(known))}"


def _convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the annotated type; only lossless changes (int to float, list to tuple)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return from_section(hint, value, path)
    elif origin in (tuple, list, collections.abc.Sequence):
        if isinstance(value, list | tuple):
            return tuple(_convert(v, args[0] if args else Any, f"{path}[{i}]") for i, v in enumerate(value))
    elif origin in (dict, collections.abc.Mapping) or hint is dict:
        if isinstance(value, Mapping):
            return {str(k): _convert(v, args[1] if args else Any, f"{path}.{k}") for k, v in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    name = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    raise ValueError(f"{path}: got {value!r} ({type(value).__name__}), expected {name}")


def to_json(value: Any) -> Any:
    """A dataclass tree as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return value


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys at which two JSON objects differ."""
    found = []
    for key in sorted(a.keys() | b.keys()):
        path = f"{prefix}{key}"
        left, right = a.get(key), b.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differing_keys(left, right, f"{path}.")
        elif left != right:
            found.append(path)
    return found
