"""The coordinator's rules: who trains, when a rollout is over, and where every worker's time went. Pure.

Life of a rollout:
  1. `Open`: every worker is BUSY.
  2. A worker that has run dry reports IDLE. Once `min_idle` workers have no requests, each of them is given a window,
     by a directive that carries its number, and reports TRAINING.
  3. A window ends because its worker says so (requests came, training no longer helps, training failed) or is told so
     (recalled, rollout over). A worker may get another, unless its last one was spent: see `messages.SPENT`.
  4. The counts of completed requests add up to the number of requests: the rollout is over. Nothing else ends it, so
     requests that changed hands while messages were under way are waited for.
  5. Each worker reports LEARNING: it has left. With the last one the rollout is closed.

A worker that is lost takes its requests along; the rollout is then over with a failure, and every other worker leaves.

Invariants, for any order, delay or repetition of messages:
  - Of a worker's reports the newest counts; directives to a worker carry ascending versions.
  - Window numbers are never used twice.
  - Every second since `start` is charged to exactly one state of each worker.
"""

from __future__ import annotations

import dataclasses

from tlt_jax.coordinator.messages import (
    SPENT,
    Action,
    Added,
    Change,
    Directive,
    Event,
    Lost,
    Open,
    Recall,
    Release,
    Report,
    WorkerState,
)

_WITHOUT_WORK = (WorkerState.IDLE, WorkerState.TRAINING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """When idle workers train.

    Attributes:
      train: whether idle workers train the drafter at all.
      min_idle: workers without requests before the first of them is promoted.
    """

    train: bool = True
    min_idle: int = 1

    def __post_init__(self):
        if self.min_idle < 1:
            raise ValueError(f"coordinator.min_idle: got {self.min_idle}, expected >= 1 worker")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """What the coordinator knows of a worker, and wants of it."""

    state: WorkerState = WorkerState.LEARNING
    since_s: float = 0.0  # when `state` began
    seconds: tuple[tuple[WorkerState, float], ...] = ()  # in states that have ended
    window_id: int | None = None  # of `state`
    # Within the rollout:
    seq: int = 0  # of the newest report
    num_done: int = 0
    version: int = 0  # of the newest directive
    granted: int | None = None  # window that the newest directive wants
    is_spent: bool = False
    is_recalled: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorState:
    """Everything the coordinator remembers."""

    config: CoordinatorConfig
    workers: tuple[Worker, ...]
    rollout: int = 0  # in progress, or the last one
    num_requests: int = 0
    is_training: bool = True  # idle workers may train in this rollout
    is_over: bool = True
    failure: str = ""
    next_window: int = 1
    num_dropped: int = 0  # messages that were late, came twice or made no sense

    @property
    def is_closed(self) -> bool:
        """Every worker has left the rollout."""
        away = (WorkerState.LEARNING, WorkerState.LOST)
        return self.is_over and all(w.state in away for w in self.workers)


def start(num_workers: int, config: CoordinatorConfig, now_s: float = 0.0) -> CoordinatorState:
    """No rollout yet; all time until the first is the learner's.

    Raises:
      ValueError: more idle workers required than there are.
    """
    if not 1 <= config.min_idle <= num_workers:
        raise ValueError(
            f"coordinator.min_idle: got {config.min_idle} for {num_workers} workers, expected between 1 and as many"
        )
    return CoordinatorState(config=config, workers=(Worker(since_s=now_s),) * num_workers)


def transition(state: CoordinatorState, event: Event, now_s: float) -> tuple[CoordinatorState, list[Action]]:
    """The next state, and what is to be done about it.

    Args:
      state: as it is.
      event: what happened.
      now_s: when, on the coordinator's clock; it never goes back.
    """
    actions: list[Action] = []
    match event:
        case Open():
            state = _open(state, event, now_s, actions)
        case Report():
            state = _hear(state, event, now_s, actions)
        case Lost():
            state = _lose(state, event, now_s, actions)
        case Added():
            state = _add(state, event, actions)
        case Recall() | Release():
            is_recalled = isinstance(event, Recall)
            state = _set(state, event.worker, is_recalled=is_recalled)
    return _direct(state, actions), actions


def time_in_states(state: CoordinatorState, worker: int, now_s: float) -> dict[WorkerState, float]:
    """Seconds of a worker in each state since `start`; they add up to the time since then."""
    w = state.workers[worker]
    seconds = dict.fromkeys(WorkerState, 0.0) | dict(w.seconds)
    seconds[w.state] += max(now_s - w.since_s, 0.0)
    return seconds


def _open(state: CoordinatorState, event: Open, now_s: float, actions: list[Action]) -> CoordinatorState:
    if event.rollout <= state.rollout:
        return dataclasses.replace(state, num_dropped=state.num_dropped + 1)
    state = dataclasses.replace(
        state,
        rollout=event.rollout,
        num_requests=event.num_requests,
        is_training=state.config.train and event.train,
        is_over=event.num_requests == 0,
        failure="",
    )
    for i in range(len(state.workers)):
        state = _enter(state, i, WorkerState.BUSY, None, now_s, actions)
        state = _set(state, i, seq=0, num_done=0, version=0, granted=None, is_spent=False, is_recalled=False)
    if state.is_over:
        state = _end(state, actions)
    return state


def _hear(state: CoordinatorState, report: Report, now_s: float, actions: list[Action]) -> CoordinatorState:
    w = state.workers[report.worker]
    if report.rollout != state.rollout or report.seq <= w.seq or w.state is WorkerState.LOST:
        return dataclasses.replace(state, num_dropped=state.num_dropped + 1)
    state = _enter(state, report.worker, report.state, report.window_id, now_s, actions)
    is_used = report.window_end is not None and report.window_id == w.granted
    state = _set(
        state,
        report.worker,
        seq=report.seq,
        num_done=report.num_done,
        granted=None if is_used else w.granted,
        is_spent=w.is_spent or report.window_end in SPENT,
    )
    if not state.is_over and sum(x.num_done for x in state.workers) >= state.num_requests:
        state = _end(dataclasses.replace(state, is_over=True), actions)
    return state


def _lose(state: CoordinatorState, event: Lost, now_s: float, actions: list[Action]) -> CoordinatorState:
    if event.rollout != state.rollout or state.workers[event.worker].state is WorkerState.LOST:
        return dataclasses.replace(state, num_dropped=state.num_dropped + 1)
    state = _enter(state, event.worker, WorkerState.LOST, None, now_s, actions)
    if state.is_over:
        return state
    failure = f"worker {event.worker}: {event.reason}"
    return _end(dataclasses.replace(state, is_over=True, failure=failure), actions)


def _add(state: CoordinatorState, event: Added, actions: list[Action]) -> CoordinatorState:
    """More requests: whoever trains goes to look for them first, and is promoted again if it finds none."""
    if event.rollout != state.rollout or state.is_over:
        return dataclasses.replace(state, num_dropped=state.num_dropped + 1)
    state = dataclasses.replace(state, num_requests=state.num_requests + event.num_requests)
    for i, w in enumerate(state.workers):
        if w.granted is not None:
            state = _tell(state, i, actions)
    return state


def _end(state: CoordinatorState, actions: list[Action]) -> CoordinatorState:
    for i, w in enumerate(state.workers):
        if w.state is not WorkerState.LOST:
            state = _tell(state, i, actions)
    return state


def _direct(state: CoordinatorState, actions: list[Action]) -> CoordinatorState:
    """Takes windows from workers that may not have one, and gives windows to those that may."""
    if state.is_over:
        return state
    for i, w in enumerate(state.workers):
        if w.granted is not None and (w.is_recalled or w.is_spent or w.state not in _WITHOUT_WORK):
            state = _tell(state, i, actions)
    num_idle = sum(w.state in _WITHOUT_WORK for w in state.workers)
    if not state.is_training or num_idle < state.config.min_idle:
        return state
    for i, w in enumerate(state.workers):
        if w.state is WorkerState.IDLE and w.granted is None and not (w.is_recalled or w.is_spent):
            state = _tell(state, i, actions, state.next_window)
            state = dataclasses.replace(state, next_window=state.next_window + 1)
    return state


def _tell(
    state: CoordinatorState, worker: int, actions: list[Action], window_id: int | None = None
) -> CoordinatorState:
    version = state.workers[worker].version + 1
    actions.append(
        Directive(
            worker=worker,
            rollout=state.rollout,
            version=version,
            window_id=window_id,
            is_over=state.is_over,
            failure=state.failure,
        )
    )
    return _set(state, worker, version=version, granted=window_id)


def _enter(
    state: CoordinatorState,
    worker: int,
    new: WorkerState,
    window_id: int | None,
    now_s: float,
    actions: list[Action],
) -> CoordinatorState:
    """Charges the time so far to the old state."""
    w = state.workers[worker]
    window_id = window_id if new is WorkerState.TRAINING else None
    if (w.state, w.window_id) == (new, window_id):
        return state
    now_s = max(now_s, w.since_s)
    seconds = dict(w.seconds)
    seconds[w.state] = seconds.get(w.state, 0.0) + now_s - w.since_s
    actions.append(Change(worker=worker, state=new, window_id=window_id, time_s=now_s))
    return _set(state, worker, state=new, since_s=now_s, seconds=tuple(sorted(seconds.items())), window_id=window_id)


def _set(state: CoordinatorState, worker: int, /, **fields: object) -> CoordinatorState:
    workers = list(state.workers)
    workers[worker] = dataclasses.replace(workers[worker], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(state, workers=tuple(workers))
