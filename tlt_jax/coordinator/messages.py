"""What workers and the coordinator say to each other. Plain data: it travels as JSON.

A report says all that its worker is and has done in the rollout, a directive all that is wanted of a worker: whoever
reads the newest one need not have read those before. A report carries a sequence number, a directive a version; what
is not newer than the last one read was late or came twice, and is dropped. Both name their rollout, so nothing that
was under way when a rollout ended is taken for part of the next.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any


class WorkerState(enum.StrEnum):
    """Where a worker's time goes. It is in one state at any time."""

    BUSY = "BUSY"  # has requests of the rollout
    IDLE = "IDLE"  # has none, and waits for the end of the rollout or for work
    TRAINING = "TRAINING"  # has none, and trains the drafter in a window
    LEARNING = "LEARNING"  # between rollouts: the devices belong to the learner
    LOST = "LOST"  # failed


class WindowEnd(enum.StrEnum):
    """Why a window of training ended."""

    STOPPED = "stopped"  # by directive: the rollout is over, or the worker was recalled
    WORK = "work"  # requests came
    BUDGET = "budget"  # training no longer helped
    FAILED = "failed"  # training raised an error; the rollout goes on


# After these there is no point in another window within the same rollout.
SPENT = (WindowEnd.BUDGET, WindowEnd.FAILED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A worker to the coordinator.

    Attributes:
      worker: who.
      rollout: which rollout the worker is in.
      seq: counts up from 1 within the rollout.
      state: what the worker now is.
      num_done: requests that it has completed in this rollout.
      window_id: where TRAINING, the window; else its last one in this rollout.
      window_end: why that window ended; None while it lasts.
    """

    worker: int
    rollout: int
    seq: int
    state: WorkerState
    num_done: int
    window_id: int | None = None
    window_end: WindowEnd | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Directive:
    """The coordinator to a worker: what is wanted from now on.

    Attributes:
      worker: to whom.
      rollout: in which rollout.
      version: counts up from 1 within the rollout, per worker.
      window_id: train in this window once the worker has no requests; None: do not train.
      is_over: every request of the rollout is done (or lost: see `failure`); leave it.
      failure: why the rollout cannot be completed; "" where it was.
    """

    worker: int
    rollout: int
    version: int
    window_id: int | None = None
    is_over: bool = False
    failure: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Open:
    """The loop to the coordinator: a rollout of so many requests begins; every worker has access to its queue.

    Attributes:
      rollout: its number, above all before it.
      num_requests: how many.
      train: whether idle workers may train.
    """

    rollout: int
    num_requests: int
    train: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Added:
    """The loop to the coordinator: more requests have come to the queue of the rollout in progress."""

    rollout: int
    num_requests: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """The loop to the coordinator: this worker shall not train, until `Release` or the next rollout."""

    worker: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """The loop to the coordinator: this worker may train again."""

    worker: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """A worker failed, and its requests with it: the rollout cannot be completed."""

    worker: int
    rollout: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A worker's state changed: one line of the timeline."""

    worker: int
    state: WorkerState
    window_id: int | None
    time_s: float


Event = Report | Open | Added | Recall | Release | Lost
Action = Directive | Change


def to_json(message: Report | Directive | Lost) -> str:
    """One line, with the message's type."""
    return json.dumps({"type": type(message).__name__} | dataclasses.asdict(message))


def from_json(text: str) -> Report | Directive | Lost:
    """What `to_json` wrote.

    Raises:
      ValueError: a message of a type that is not sent, or with other fields.
    """
    fields: dict[str, Any] = json.loads(text)
    kinds = {kind.__name__: kind for kind in (Report, Directive, Lost)}
    kind = kinds.get(fields.pop("type", ""))
    if kind is Report:
        fields["state"] = WorkerState(fields["state"])
        fields["window_end"] = None if fields["window_end"] is None else WindowEnd(fields["window_end"])
    if kind is None or set(fields) != {f.name for f in dataclasses.fields(kind)}:
        raise ValueError(f"message: got {text!r}, expected one of {', '.join(kinds)} as this release writes them")
    return kind(**fields)
