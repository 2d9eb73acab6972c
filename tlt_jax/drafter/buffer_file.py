"""What `DataBuffer.get_state` gives, in one file: arrays as safetensors, the rest as JSON in its header."""

from __future__ import annotations

import json
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tlt_jax import files

State = tuple[dict[str, Any], dict[str, np.ndarray]]  # of one buffer: JSON, and arrays


def write(path: str | os.PathLike[str], states: dict[str, State]) -> None:
    """Replaces the file by the states of several buffers; it is whole, or the one before.

    Raises:
      OSError: of the file system.
    """
    arrays = {f"{name}/{key}": as_bits(x) for name, (_, own) in states.items() for key, x in own.items()}
    header = {name: json.dumps(meta) for name, (meta, _) in states.items()}
    with files.atomic_path(path) as temporary:
        save_file(arrays, temporary, metadata=header)


def read(path: str | os.PathLike[str]) -> dict[str, State]:
    """The states that `write` was given."""
    with safe_open(path, framework="numpy") as f:
        states: dict[str, State] = {name: (json.loads(text), {}) for name, text in f.metadata().items()}
        for key in f.keys():  # noqa: SIM118  # no mapping
            name, _, field = key.partition("/")
            states[name][1][field] = from_bits(f.get_tensor(key))
    return states


def as_bits(x: np.ndarray) -> np.ndarray:
    """bfloat16 as its bits: the numpy side of the file format has no such type."""
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: np.ndarray) -> np.ndarray:
    """Back again; arrays of other types stay as they are."""
    return x.view(jnp.bfloat16) if x.dtype == np.uint16 else x
