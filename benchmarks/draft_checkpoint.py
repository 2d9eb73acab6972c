"""`launch.bench checkpoint`: how long drafter training stands still while a checkpoint of the drafter is made.

    sync_full          the trainable weights, their optimizer state, and the frozen embedding and head; the trainer goes
                       on when all is on disk
    async_full         the same through `CheckpointStore.save` alone: the trainer goes on when its copy is made
    async_selective    the same without what is frozen, as `launch.train_drafter` and the runs save it
    window_snapshot    the trainable weights alone, as idle workers write them inside a window; the copy is made by the
                       device, before its next step, and is not in the figure

Retention is part of the time: the oldest checkpoint goes when the next is made. A save begins when the one before is
on disk. Tensors have the shapes of the run's model and random values.
"""

from __future__ import annotations

import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from benchmarks import machine
from benchmarks.drafter import Sized, make_sized
from launch.run_config import RunConfig
from tlt_jax.checkpoint import CheckpointConfig, CheckpointStore
from tlt_jax.coordinator.spot_trainer import Snapshot

_SETTLE_S = 0.05  # from the last file's name to the end of the thread that wrote it


class Method(NamedTuple):
    """One way to make a checkpoint.

    Attributes:
      save: step -> None; what the trainer waits for.
      settle: step -> None; returns when the checkpoint is on disk.
      close: nothing follows.
      num_bytes: of the arrays.
    """

    save: Callable[[int], None]
    settle: Callable[[int], None]
    close: Callable[[], None]
    num_bytes: int


def checkpoint(run: RunConfig, repeats: int, directory: str = "") -> dict[str, Any]:
    """Milliseconds that the trainer stands still, by method.

    Args:
      run: model and `drafter` section.
      repeats: timed checkpoints of each method, in turn; one more of each comes first.
      directory: where to write, for the disk makes a difference; empty takes the system's temporary one. What is
        written is removed.

    Returns:
      By method `NAME_ms` and `written_ms` (until it is on disk), medians, and `num_bytes`; `ratio` is sync_full over
      async_selective.

    Raises:
      ValueError: settings that do not fit the model.
    """
    sized = make_sized(run)
    with tempfile.TemporaryDirectory(dir=directory or None) as folder:
        methods = _make_methods(sized, pathlib.Path(folder))
        blocked_ms, written_ms = _race(methods, repeats)
        for method in methods.values():
            method.close()
    median_ms = {name: statistics.median(x) for name, x in blocked_ms.items()}
    return {
        **{f"{name}_ms": x for name, x in median_ms.items()},
        "ratio": median_ms["sync_full"] / median_ms["async_selective"],
        "ratio_async": median_ms["sync_full"] / median_ms["async_full"],
        "num_bytes": {name: method.num_bytes for name, method in methods.items()},
        "written_ms": {name: statistics.median(x) for name, x in written_ms.items()},
        "blocked_ms": blocked_ms,
        "repeats": repeats,
        **sized.facts(),
        "directory": directory or tempfile.gettempdir(),
        "machine": machine.describe(),
    }


def _make_methods(sized: Sized, folder: pathlib.Path) -> dict[str, Method]:
    state = sized.trainer.init(sized.draft_params)
    full, selective = {"drafter": {"state": state, "frozen": sized.frozen}}, {"drafter": state}
    snapshot = Snapshot(folder / "window_snapshot.safetensors")
    return {
        "sync_full": _stored(folder / "sync_full", full, is_sync=True),
        "async_full": _stored(folder / "async_full", full),
        "async_selective": _stored(folder / "async_selective", selective),
        "window_snapshot": Method(
            save=lambda step: snapshot.write(state.params),
            settle=lambda step: snapshot.wait(),
            close=snapshot.wait,
            num_bytes=_num_bytes(state.params),
        ),
    }


def _stored(path: pathlib.Path, items: dict[str, Any], *, is_sync: bool = False) -> Method:
    store = CheckpointStore(path, CheckpointConfig(num_keep=1))

    def save(step: int) -> None:
        store.save(step, items)
        if is_sync:
            store.wait()

    return Method(save=save, settle=functools.partial(_wait_for, path), close=store.close, num_bytes=_num_bytes(items))


def _num_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _wait_for(path: pathlib.Path, step: int) -> None:
    """Until a complete checkpoint has its name; the store's own `wait` would also do the work of its next save."""
    while not any(p.name.isdigit() and int(p.name) == step for p in path.iterdir()):
        time.sleep(1e-3)


def _race(methods: dict[str, Method], repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds until `save` returned, and until the checkpoint was on disk, without the first of each."""
    blocked_ms: dict[str, list[float]] = {name: [] for name in methods}
    written_ms: dict[str, list[float]] = {name: [] for name in methods}
    for step in range(1, repeats + 2):
        for name, method in methods.items():
            start_s = time.perf_counter()
            method.save(step)
            saved_s = time.perf_counter()
            method.settle(step)
            done_s = time.perf_counter()
            time.sleep(_SETTLE_S)
            if step > 1:
                blocked_ms[name].append(1e3 * (saved_s - start_s))
                written_ms[name].append(1e3 * (done_s - start_s))
    return blocked_ms, written_ms
