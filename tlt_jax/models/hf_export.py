"""Models out: Hugging Face directories that transformers, vLLM and SGLang load.

Life of `save_hf(out_dir, config, params)`:
1. The files are planned from names and shapes alone: safetensors shards of at most 5 GB and, with several, an index.
2. Parameters are gathered one at a time, and process 0 appends each to its shard: one tensor in host memory, never a
   shard or the model. Every process takes part in every gather, also where the disk of process 0 fails.
3. `config.json`, tokenizer files and `generation_config.json` are added, and the directory, written under a temporary
   name, is renamed into place: it is complete or it is not there.

Values and vocabulary rows go out as they are: load, save, load is equal to the bit, and rows that are no tokens stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from tlt_jax.models.config import ModelConfig
from tlt_jax.models.hf import DTYPES, INDEX_FILE, SINGLE_FILE, flatten, open_model, param_names, read_tensor
from tlt_jax.types import Params

MAX_SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
# Drafters also carry a vocabulary map, of whole numbers.
_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {"int64": "I64", "bool": "BOOL"}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of a safetensors file."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # numpy's name of it: "float32", "bfloat16", ...

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def save_hf(
    out_dir: str | pathlib.Path,
    config: ModelConfig,
    params: Params,
    source_dir: str | pathlib.Path | None = None,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a model directory. With several processes all of them call this, with the same arguments.

    Args:
      out_dir: directory to create; must not exist yet.
      config: configuration of `params`.
      params: parameters in any sharding.
      source_dir: directory whose tokenizer files and `generation_config.json` are copied.
      dtype: dtype of the files; None keeps that of each parameter.
      max_shard_bytes: size limit of one file (a larger tensor gets a file of its own).

    Raises:
      ValueError: `out_dir` exists, or the parameters are not those that `config` describes.
      OSError: the disk refused; raised by every process, and no directory is left behind.
    """
    out_dir = pathlib.Path(out_dir)
    names = param_names(config)
    flat = flatten(params)
    _check_params(names, flat)
    specs = [TensorSpec(name, shape, str(jnp.dtype(dtype or flat[p].dtype))) for p, (name, shape) in names.items()]
    arrays = (_gather(flat[path]) for path in names)
    error: Exception | None = None
    if jax.process_index() == 0:
        try:
            with new_directory(out_dir) as tmp_dir:
                write_tensors(tmp_dir, specs, arrays, max_shard_bytes)
                write_config(tmp_dir, config, specs[0].dtype, source_dir)
        except (OSError, ValueError) as caught:
            error = caught  # raised below: the other processes are still in their gathers
    for _ in arrays:
        pass
    if _any_process(error is not None):
        raise error or OSError(f"{out_dir}: process 0 could not write the model; its log says why")


def rewrite_hf(model_dir: str | pathlib.Path, out_dir: str | pathlib.Path, dtype: str | None = None) -> ModelConfig:
    """Checks a model directory and writes it anew, in `dtype` (None keeps each tensor's), one tensor in memory.

    The result has the usual names and file sizes, whatever prefix or shards the source had.

    Raises:
      ValueError: as `load_hf`, or `out_dir` exists.
    """
    config, tensors = open_model(model_dir)
    names = param_names(config)
    specs = [TensorSpec(*names[path], dtype or DTYPES[tensor.get_dtype()]) for path, tensor in tensors.items()]
    with new_directory(out_dir) as tmp_dir:
        write_tensors(tmp_dir, specs, map(read_tensor, tensors.values()), MAX_SHARD_BYTES)
        write_config(tmp_dir, config, specs[0].dtype, model_dir)
    return config


@contextlib.contextmanager
def new_directory(out_dir: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary directory that becomes `out_dir` on success and vanishes on failure.

    Raises:
      ValueError: where `out_dir` exists.
    """
    out_dir = pathlib.Path(out_dir).absolute()
    if out_dir.exists():
        raise ValueError(f"{out_dir}: got an existing path, expected a new one; choose another or remove it")
    tmp_dir = out_dir.with_name(f".{out_dir.name}.tmp-{secrets.token_hex(4)}")
    tmp_dir.mkdir(parents=True)
    try:
        yield tmp_dir
        tmp_dir.rename(out_dir)
    finally:
        shutil.rmtree(tmp_dir, ignore_errors=True)


def write_tensors(
    out_dir: pathlib.Path, specs: Sequence[TensorSpec], arrays: Iterable[np.ndarray], max_shard_bytes: int
) -> None:
    """Streams arrays, in the order of `specs` and cast to their dtypes, into safetensors files and an index."""
    arrays = iter(arrays)
    shards = _split(specs, max_shard_bytes)
    weight_map = {}
    for i, shard in enumerate(shards):
        file_name = SINGLE_FILE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update((spec.name, file_name) for spec in shard)
        with open(out_dir / file_name, "wb") as file:
            file.write(_header(shard))
            for spec in shard:
                array = next(arrays)
                assert array.shape == spec.shape, (spec, array.shape)
                file.write(np.ascontiguousarray(array, dtype=jnp.dtype(spec.dtype)).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        total = {"total_size": sum(spec.num_bytes for spec in specs)}
        write_json(out_dir / INDEX_FILE, {"metadata": total, "weight_map": weight_map})


def write_config(
    out_dir: pathlib.Path, config: ModelConfig, dtype: str, source_dir: str | pathlib.Path | None = None
) -> None:
    """Writes `config.json`, copies the tokenizer files, and copies or makes `generation_config.json`."""
    fields = config.to_hf()
    # Both spellings: transformers 5 reads `dtype`, everything older `torch_dtype`.
    write_json(out_dir / "config.json", fields | {"dtype": dtype, "torch_dtype": dtype})
    generation = out_dir / "generation_config.json"
    if source_dir is not None:
        for name in (*TOKENIZER_FILES, generation.name):
            if (pathlib.Path(source_dir) / name).exists():
                shutil.copyfile(pathlib.Path(source_dir) / name, out_dir / name)
    if not generation.exists():
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(generation, {key: fields[key] for key in ids if fields[key] is not None})


def write_json(path: pathlib.Path, value: dict[str, Any], indent: int | None = 2) -> None:
    """Writes one JSON object, non-ASCII characters as they are."""
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_params(names: dict[str, tuple[str, tuple[int, ...]]], flat: dict[str, Any]) -> None:
    expected = {path: shape for path, (_, shape) in names.items()}
    got = {path: tuple(x.shape) for path, x in flat.items()}
    if got != expected:
        differing = sorted(path for path in got.keys() | expected.keys() if got.get(path) != expected.get(path))
        detail = ", ".join(f"{p}: got {got.get(p)}, expected {expected.get(p)}" for p in differing[:8])
        raise ValueError(f"parameters do not fit the configuration at {len(differing)} paths: {detail}")


def _gather(x: Any) -> np.ndarray:
    """The whole array on this host; a collective where other hosts hold parts of it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    if isinstance(x, jax.Array):
        x = jnp.copy(x)  # an array keeps the host copy that was made of it: let that be an array that goes away
    return np.asarray(x)


def _any_process(flag: bool) -> bool:
    """True on every process if it is on process 0; also the point where all wait for the files to be there."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


def _split(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors into files, none above the limit unless it holds a single tensor."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return shards


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """The head of a safetensors file: its length, then a JSON table of types, shapes and byte offsets.

    Written here and not by `safetensors.save_file`, which wants every tensor of the file in memory at once.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        table[spec.name] = {"dtype": _TYPE_NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8, as readers that map the file expect
    return len(text).to_bytes(8, "little") + text
