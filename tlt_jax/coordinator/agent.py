"""A worker's side of the rules: what it may do next, and what it reports. Pure.

Life of a worker in a rollout:
  1. It begins BUSY. When it has no requests and finds none, it turns IDLE.
  2. IDLE, it trains if the newest directive grants a window that it has not had yet; between two training steps it asks
     `may_train` again.
  3. Requests that turn up make it BUSY again, whatever it was doing.
  4. Once a directive says that the rollout is over it stops what it does, and leaves.

Each change gives a report to send.
"""

from __future__ import annotations

import dataclasses

from tlt_jax.coordinator.messages import Directive, Report, WindowEnd, WorkerState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent:
    """What a worker remembers of the rollout it is in."""

    worker: int
    rollout: int
    state: WorkerState = WorkerState.BUSY
    seq: int = 0
    num_done: int = 0
    window_id: int | None = None  # in progress where TRAINING, else the last one
    window_end: WindowEnd | None = None
    newest: Directive | None = None

    @property
    def is_over(self) -> bool:
        return self.newest is not None and self.newest.is_over

    @property
    def failure(self) -> str:
        """Why the rollout ended before its requests were done; "" where it did not."""
        return self.newest.failure if self.newest is not None else ""

    @property
    def granted(self) -> int | None:
        """The window to train in now; None: do not begin, or stop."""
        if self.newest is None or self.newest.is_over or self.state not in (WorkerState.IDLE, WorkerState.TRAINING):
            return None
        window_id = self.newest.window_id
        return None if window_id == self.window_id and self.window_end is not None else window_id

    @property
    def may_train(self) -> bool:
        """Whether the window in progress may go on for another step."""
        return self.state is WorkerState.TRAINING and self.granted == self.window_id


def receive(agent: Agent, directive: Directive) -> Agent:
    """Takes a directive, unless it is of another rollout or no newer than one that was read before."""
    is_new = agent.newest is None or directive.version > agent.newest.version
    if directive.rollout != agent.rollout or directive.worker != agent.worker or not is_new:
        return agent
    return dataclasses.replace(agent, newest=directive)


def turn_idle(agent: Agent, num_done: int) -> tuple[Agent, Report]:
    """The worker has no requests and found none."""
    assert agent.state is WorkerState.BUSY
    return _report(dataclasses.replace(agent, state=WorkerState.IDLE, num_done=num_done))


def turn_busy(agent: Agent) -> tuple[Agent, Report]:
    """The worker has found requests while it had none."""
    assert agent.state is WorkerState.IDLE
    return _report(dataclasses.replace(agent, state=WorkerState.BUSY))


def begin_window(agent: Agent) -> tuple[Agent, Report]:
    """The worker begins to train in the window that it was granted."""
    assert agent.state is WorkerState.IDLE and agent.granted is not None
    return _report(dataclasses.replace(agent, state=WorkerState.TRAINING, window_id=agent.granted, window_end=None))


def end_window(agent: Agent, end: WindowEnd) -> tuple[Agent, Report]:
    """The worker has stopped training; it is IDLE."""
    assert agent.state is WorkerState.TRAINING
    return _report(dataclasses.replace(agent, state=WorkerState.IDLE, window_end=end))


def leave(agent: Agent) -> tuple[Agent, Report]:
    """The worker's part in the rollout has ended."""
    assert agent.state is not WorkerState.TRAINING
    return _report(dataclasses.replace(agent, state=WorkerState.LEARNING))


def _report(agent: Agent) -> tuple[Agent, Report]:
    agent = dataclasses.replace(agent, seq=agent.seq + 1)
    return agent, Report(
        worker=agent.worker,
        rollout=agent.rollout,
        seq=agent.seq,
        state=agent.state,
        num_done=agent.num_done,
        window_id=agent.window_id,
        window_end=agent.window_end,
    )
