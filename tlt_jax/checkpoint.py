"""Checkpoints: one directory per step, written in the background, whole or not there.

Life of a save:
1. `save` waits for the save before it (and raises what that one failed with), copies what the caller is about to donate
   or change, and returns; a background thread writes the rest into a temporary directory.
2. When all is on disk the directory gets its name in one rename. There is no pointer file: the newest directory with a
   readable manifest is the newest checkpoint.
3. The next `save`, `wait` or `close` removes what retention no longer wants: all but the newest `num_keep` and the best
   one. A directory is renamed before it is deleted, so a kill in between leaves no half checkpoint under a step's name.

Invariants: a step that `steps()` lists can be restored, whatever killed the process and when; steps are written once,
in ascending order; nothing is deleted before a newer checkpoint is complete.

Layout: `DIR/00000100/{manifest,NAME,...}`. An item is a pytree of arrays, or anything JSON can hold. The manifest holds
the step, the items with the shapes of their arrays, the metrics, a summary for people, and versions.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from tlt_jax.processes import Group

_MANIFEST = "manifest"
_DELETED = ".deleted"
_JSON_FILE = "metadata"  # Orbax's name for the one file of a JSON item
_TREE_FILE = "_METADATA"  # Orbax's name for the description of a pytree item


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message names its step; earlier checkpoints are intact."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Which checkpoints a run keeps.

    Attributes:
      every_steps: RL steps between checkpoints; the last step is always saved. 0 saves the last step alone.
      num_keep: newest checkpoints kept for resuming.
      best_metric: metric whose best checkpoint is kept as well; empty keeps none apart.
      best_mode: "max" or "min".
    """

    every_steps: int = 20
    num_keep: int = 2
    best_metric: str = ""
    best_mode: str = "max"

    def __post_init__(self):
        if self.every_steps < 0:
            raise ValueError(f"checkpoint.every_steps: got {self.every_steps}, expected >= 0 (0: only the last step)")
        if self.num_keep < 1:
            raise ValueError(f"checkpoint.num_keep: got {self.num_keep}, expected >= 1, or nothing could be resumed")
        if self.best_mode not in ("max", "min"):
            raise ValueError(f"checkpoint.best_mode: got {self.best_mode!r}, expected 'max' or 'min'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint in memory: items by name, and the manifest it was written with."""

    step: int
    items: dict[str, Any]
    manifest: dict[str, Any]

    def describe(self) -> str:
        """One line that says what was restored, for the log."""
        facts = {"step": self.step, **self.manifest["summary"], "items": "+".join(sorted(self.items))}
        facts["saved by"] = ", ".join(f"{name} {version}" for name, version in self.manifest["versions"].items())
        saved_on = f"{self.manifest['num_devices']} devices in {self.manifest['num_processes']} processes"
        return "restored " + " | ".join(f"{name} {value}" for name, value in facts.items()) + f" | saved on {saved_on}"


class CheckpointStore:
    """The checkpoints in one directory.

    Every process of a job makes the store and calls its methods in the same order; the first process alone deletes,
    and its view of the directory is everybody's.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig,
        *,
        read_only: bool = False,
        group: Group | None = None,
    ):
        """Opens `directory`; unless `read_only`, makes it and clears what killed processes left unfinished."""
        self._group = group or Group()
        self._dir = epath.Path(directory).absolute() if "://" not in str(directory) else epath.Path(directory)
        self._config = config
        self._read_only = read_only
        self._pending_step: int | None = None
        self._checkpointer = _make_checkpointer(self._dir)
        if not read_only and self._group.is_first:
            self._dir.mkdir(parents=True, exist_ok=True)
            self._clear_unfinished()
        self._manifests = self._read_manifests()

    def steps(self) -> list[int]:
        """Steps that can be restored, ascending."""
        return sorted(self._manifests)

    def latest_step(self) -> int | None:
        """The newest step that can be restored; None where there is none."""
        return max(self._manifests, default=None)

    def best_step(self) -> int | None:
        """The step with the best value of `config.best_metric`; of equals the newest. None where no step has one."""
        scored = []
        for step, manifest in self._manifests.items():
            value = manifest["metrics"].get(self._config.best_metric)
            if value is not None:
                scored.append((value if self._config.best_mode == "max" else -value, step))
        return max(scored)[1] if scored else None

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts writing a checkpoint and returns when the caller may donate, delete or change the items.

        Args:
          step: finished RL steps; later than any checkpoint here.
          items: name -> pytree of arrays (each process holds its shards), or a value that JSON can hold.
          metrics: numbers that `best_metric` may name; those that are not finite are left out.
          summary: few facts for `Restored.describe`: data position, optimizer count, seed, versions.

        Raises:
          CheckpointError: the save before this one failed, or this one could not begin.
          ValueError: a step not later than the newest, or an item that is neither pytree nor JSON.
        """
        if self._read_only:
            raise ValueError(f"checkpoint: got save({step}) on {self._dir} opened read-only, expected a writable store")
        self.wait()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"checkpoint: got step {step}, expected one after {latest}, the newest in {self._dir}; to go back, "
                f"call delete_after({step - 1}) first, or use another workdir"
            )
        args = {name: _save_args(name, item) for name, item in items.items()}
        manifest = _make_manifest(step, items, metrics or {}, summary or {})
        args[_MANIFEST] = ocp.args.JsonSave(manifest)
        try:
            self._checkpointer.save(self._dir / _step_name(step), args=ocp.args.Composite(**args))
        except (OSError, ValueError) as error:
            raise CheckpointError(self._failure(step)) from error
        self._pending_step = step

    def wait(self) -> None:
        """Waits for the save in flight, then removes what retention no longer wants.

        Raises:
          CheckpointError: that save failed.
        """
        step, self._pending_step = self._pending_step, None
        if step is None:
            return
        try:
            self._checkpointer.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:  # tensorstore, the file system, a barrier
            raise CheckpointError(self._failure(step)) from error
        self._manifests = self._read_manifests()
        if step not in self._manifests:
            raise CheckpointError(self._failure(step))
        self._remove_unwanted()

    def close(self) -> None:
        """As `wait`; the store is not used after it."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def restore(
        self, targets: Mapping[str, Any], *, step: int | None = None, optional: Collection[str] = ()
    ) -> Restored | None:
        """Reads items of one checkpoint, arrays straight into the shardings of their targets.

        Args:
          targets: name -> pytree like the saved one, of arrays or `jax.ShapeDtypeStruct`s with a sharding (of any
            number of devices), or None for a JSON item.
          step: which checkpoint; None takes the newest.
          optional: names that may be missing; they are then missing in the result too.

        Returns:
          The checkpoint, or None where `step` is None and there is no checkpoint.

        Raises:
          ValueError: no such step; a missing item; a target with other names or shapes, each listed.
        """
        if step is None:
            step = self.latest_step()
            if step is None:
                return None
        manifest = self._manifest_of(step)
        saved = manifest["items"]
        missing = [name for name in targets if name not in saved and name not in optional]
        if missing:
            raise ValueError(f"checkpoint: step {step} in {self._dir} lacks {missing}, it holds {sorted(saved)}")
        wanted = {name: target for name, target in targets.items() if name in saved}
        args = {name: _restore_args(f"{name} of step {step}", target, saved[name]) for name, target in wanted.items()}
        read = self._checkpointer.restore(self._dir / _step_name(step), args=ocp.args.Composite(**args)) if args else {}
        return Restored(step=step, items={name: read[name] for name in wanted}, manifest=manifest)

    def restore_part(self, name: str, target: Any, *, step: int) -> Any:
        """Reads some arrays of a pytree item, those that `target` has, and nothing else of it from disk.

        Args:
          name: the item.
          target: nested dicts of `jax.ShapeDtypeStruct`s with a sharding, keyed as the saved item's containers.
          step: which checkpoint.

        Raises:
          ValueError: no such step or item; a name of `target` that was not saved, or with another shape.
        """
        saved, wanted = self._manifest_of(step)["items"].get(name), _array_shapes(target)
        if saved is None:
            raise ValueError(f"checkpoint: step {step} in {self._dir} has no arrays under the name {name!r}")
        wrong = {key: (saved.get(key), shape) for key, shape in wanted.items() if saved.get(key) != shape}
        if wrong:
            raise ValueError(f"checkpoint: {name} of step {step} differs from the target; saved and wanted: {wrong}")
        args = ocp.args.PyTreeRestore(
            item=target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(jax.tree.map(_abstract, target)),
            partial_restore=True,
        )
        return self._checkpointer.restore(self._dir / _step_name(step), args=ocp.args.Composite(**{name: args}))[name]

    def _manifest_of(self, step: int) -> dict[str, Any]:
        if step not in self._manifests:
            raise ValueError(f"checkpoint: got step {step}, expected one of {self.steps()} in {self._dir}")
        return self._manifests[step]

    def delete_after(self, step: int) -> None:
        """Removes every checkpoint later than `step`, to go on from there."""
        self.wait()
        for later in [s for s in self._manifests if s > step]:
            self._delete(later)

    def _read_manifests(self) -> dict[int, dict[str, Any]]:
        """What process 0 finds: another may look while that one deletes."""
        found = _read_manifests(self._dir) if self._group.is_first else {}
        if self._group.count > 1:
            first = json.loads(self._group.gather("checkpoints", json.dumps(found).encode())[0])
            found = {int(step): manifest for step, manifest in first.items()}
        return found

    def _remove_unwanted(self) -> None:
        keep = {*self.steps()[-self._config.num_keep :], self.best_step()}
        for step in self.steps():
            if step not in keep:
                self._delete(step)

    def _delete(self, step: int) -> None:
        del self._manifests[step]
        if self._group.is_first:
            _delete_directory(self._dir / _step_name(step))

    def _clear_unfinished(self) -> None:
        whole = _read_manifests(self._dir)
        for path in self._dir.iterdir():
            is_step = path.name.isdigit()
            if (is_step and int(path.name) not in whole) or _is_leftover(path.name):
                logging.warning("checkpoint: removing %s, left unfinished by a process that was killed", path)
                _delete_directory(path)

    def _failure(self, step: int) -> str:
        return (
            f"the checkpoint of step {step} could not be written to {self._dir}; complete checkpoints: {self.steps()}. "
            "Check space and permissions there, then start again: the run resumes from the newest"
        )


def _make_checkpointer(directory: epath.Path) -> ocp.AsyncCheckpointer:
    # A rename commits on file systems; object stores have none, Orbax picks a commit file there.
    modes = ocp.options.AtomicityMode
    mode = modes.AUTO if "://" in str(directory) else modes.ATOMIC_RENAME
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(),
        # Directories made in the foreground: a directory that cannot be written fails the save itself, at once.
        async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        atomicity_options=ocp.options.AtomicityOptions(mode=mode),
    )


def _step_name(step: int) -> str:
    return f"{step:08d}"


def _is_leftover(name: str) -> bool:
    return name.endswith(_DELETED) or ".orbax-checkpoint-tmp" in name


def _delete_directory(path: epath.Path) -> None:
    if not path.name.endswith(_DELETED):
        path = path.rename(path.with_name(path.name + _DELETED))
    path.rmtree()


def _read_manifests(directory: epath.Path) -> dict[int, dict[str, Any]]:
    """Manifests of the complete checkpoints in a directory, by step."""
    manifests = {}
    for path in directory.iterdir() if directory.exists() else ():
        if path.name.isdigit() and ocp.utils.is_checkpoint_finalized(path):
            manifest = _read_manifest(path)
            if manifest is not None and manifest["step"] == int(path.name):
                manifests[manifest["step"]] = manifest
    return manifests


def _read_manifest(path: epath.Path) -> dict[str, Any] | None:
    """The manifest of one directory; None where it, or an item it names, is missing or cut short."""
    try:
        manifest = json.loads((path / _MANIFEST / _JSON_FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    for name, arrays in manifest["items"].items():
        if not (path / name / (_JSON_FILE if arrays is None else _TREE_FILE)).exists():
            return None
    return manifest


def _make_manifest(
    step: int, items: Mapping[str, Any], metrics: Mapping[str, float], summary: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "step": step,
        "items": {name: _array_shapes(item) if _is_pytree(item) else None for name, item in items.items()},
        "metrics": {name: float(value) for name, value in metrics.items() if math.isfinite(value)},
        "summary": _as_json("summary", dict(summary)),
        "versions": {"jax": jax.__version__, "orbax-checkpoint": importlib.metadata.version("orbax-checkpoint")},
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
    }


def _is_pytree(item: Any) -> bool:
    return any(isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(item))


def _array_shapes(tree: Any) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): list(np.shape(leaf)) for path, leaf in leaves}


def _save_args(name: str, item: Any) -> ocp.args.CheckpointArgs:
    if name == _MANIFEST:
        raise ValueError(f"checkpoint: got an item named {name!r}, expected another name: this one is the store's own")
    if _is_pytree(item):
        return ocp.args.StandardSave(jax.tree.map(_snapshot, item))
    return ocp.args.JsonSave(_as_json(name, item))


def _snapshot(leaf: Any) -> Any:
    """What the background thread may read while the caller goes on."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if isinstance(leaf, jax.Array) and next(iter(leaf.sharding.device_set)).platform == "cpu":
        # Other platforms are copied to the host before `save` returns. On CPU the host array would be the buffer
        # itself, and a donated update would wait until it is written.
        return jnp.copy(leaf)
    return leaf


def _as_json(name: str, item: Any) -> Any:
    try:
        return json.loads(json.dumps(item))
    except TypeError as error:
        raise ValueError(
            f"checkpoint: got {type(item).__name__} for {name!r}, "
            f"expected a pytree of arrays or a value JSON can hold: {error}"
        ) from error


def _restore_args(name: str, target: Any, saved: dict[str, list[int]] | None) -> ocp.args.CheckpointArgs:
    if (target is None) != (saved is None):
        kinds = ("a JSON value", "a pytree of arrays")
        raise ValueError(
            f"checkpoint: got a target for {kinds[target is not None]} for {name}, expected one for "
            f"{kinds[saved is not None]}; the target of a JSON item is None"
        )
    if saved is None:
        return ocp.args.JsonRestore()
    wanted = _array_shapes(target)
    if wanted != saved:
        common = sorted(saved.keys() & wanted.keys())
        shapes = {key: (saved[key], wanted[key]) for key in common if saved[key] != wanted[key]}
        raise ValueError(
            f"checkpoint: {name} differs from the target; "
            f"only in the checkpoint: {sorted(saved.keys() - wanted.keys())}; "
            f"only in the target: {sorted(wanted.keys() - saved.keys())}; saved and wanted shapes: {shapes}"
        )
    return ocp.args.StandardRestore(jax.tree.map(_abstract, target))


def _abstract(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    if leaf.sharding is None:
        raise ValueError("checkpoint: got a target without sharding; need one, the saved devices may not exist here")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
