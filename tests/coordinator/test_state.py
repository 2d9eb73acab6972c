"""The coordinator's rules: tables of events and what follows from them, and random schedules of up to 64 workers."""

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tlt_jax.coordinator import agent as agents
from tlt_jax.coordinator.agent import Agent
from tlt_jax.coordinator.messages import (
    Added,
    Change,
    Directive,
    Lost,
    Open,
    Recall,
    Release,
    Report,
    WindowEnd,
    WorkerState,
    from_json,
    to_json,
)
from tlt_jax.coordinator.state import CoordinatorConfig, start, time_in_states, transition

BUSY, IDLE, TRAINING, LEARNING, LOST = WorkerState
SEEDS = st.integers(0, 1 << 30)


def report(worker, seq, state, num_done, window_id=None, end=None, rollout=1):
    return Report(
        worker=worker, rollout=rollout, seq=seq, state=state, num_done=num_done, window_id=window_id, window_end=end
    )


def play(events, num_workers=3, **config):
    """Applies (time, event) pairs; returns the state and, for each event, its directives as tuples."""
    state = start(num_workers, CoordinatorConfig(**config))
    said = []
    for now_s, event in events:
        state, actions = transition(state, event, now_s)
        said.append(
            [(a.worker, a.version, "over" if a.is_over else a.window_id) for a in actions if isinstance(a, Directive)]
        )
    return state, said


OPEN = (1.0, Open(rollout=1, num_requests=6))
DRY = (2.0, report(0, 1, IDLE, 2))
TRAINS = (3.0, report(0, 2, TRAINING, 2, 1))
OVER = [(0, 2, "over"), (1, 1, "over"), (2, 1, "over")]


@pytest.mark.parametrize(
    ("events", "config", "expected"),
    [
        ([DRY], {}, [[(0, 1, 1)]]),
        ([DRY], {"train": False}, [[]]),
        ([DRY], {"min_idle": 2}, [[]]),
        ([DRY, (3.0, report(2, 1, IDLE, 2))], {"min_idle": 2}, [[], [(0, 1, 1), (2, 1, 2)]]),
        ([DRY, TRAINS], {}, [[(0, 1, 1)], []]),
        # The count decides, not who is idle: worker 2 has taken a request of worker 1, and its report is late.
        ([DRY, (3.0, report(1, 1, IDLE, 1))], {"min_idle": 3}, [[], []]),
        (
            [DRY, (3.0, report(1, 1, IDLE, 1)), (4.0, report(2, 1, IDLE, 3))],
            {},
            [[(0, 1, 1)], [(1, 1, 2)], [(0, 2, "over"), (1, 2, "over"), (2, 1, "over")]],
        ),
        # Twice, late, of another rollout: no answer.
        ([DRY, DRY], {}, [[(0, 1, 1)], []]),
        ([TRAINS, DRY], {}, [[], []]),
        ([(2.0, report(0, 1, IDLE, 2, rollout=2))], {}, [[]]),
        ([(2.0, Open(rollout=1, num_requests=9))], {}, [[]]),
        # Requests came to an idle worker: the window it was given is taken back, and the next one has another number.
        (
            [DRY, (3.0, report(0, 2, BUSY, 2)), (4.0, report(0, 3, IDLE, 3))],
            {},
            [[(0, 1, 1)], [(0, 2, None)], [(0, 3, 2)]],
        ),
        # A window ended for work, whose own report was overtaken by a later one.
        ([DRY, TRAINS, (4.0, report(0, 5, IDLE, 3, 1, WindowEnd.WORK))], {}, [[(0, 1, 1)], [], [(0, 2, 2)]]),
        # A spent window is not followed by another one.
        ([DRY, TRAINS, (4.0, report(0, 3, IDLE, 2, 1, WindowEnd.BUDGET))], {}, [[(0, 1, 1)], [], []]),
        ([DRY, TRAINS, (4.0, report(0, 3, IDLE, 2, 1, WindowEnd.FAILED))], {}, [[(0, 1, 1)], [], []]),
        (
            [
                DRY,
                TRAINS,
                (4.0, Recall(worker=0)),
                (5.0, report(0, 3, IDLE, 2, 1, WindowEnd.STOPPED)),
                (6.0, Release(worker=0)),
            ],
            {},
            [[(0, 1, 1)], [], [(0, 2, None)], [], [(0, 3, 2)]],
        ),
        ([(1.5, Recall(worker=0)), DRY], {}, [[], []]),
        # More requests: the trainer looks for them first.
        (
            [
                DRY,
                TRAINS,
                (4.0, Added(rollout=1, num_requests=2)),
                (5.0, report(0, 3, IDLE, 2, 1, WindowEnd.STOPPED)),
                (6.0, report(1, 1, IDLE, 4)),
            ],
            {},
            [[(0, 1, 1)], [], [(0, 2, None)], [(0, 3, 2)], [(1, 1, 3)]],
        ),
        ([DRY, (3.0, Lost(worker=1, rollout=1, reason="out of memory"))], {}, [[(0, 1, 1)], [OVER[0], OVER[2]]]),
        ([DRY, (3.0, Lost(worker=1, rollout=9, reason="late"))], {}, [[(0, 1, 1)], []]),
    ],
)
def test_what_the_coordinator_says_to_each_event(events, config, expected):
    """E1, E9: one place decides, whatever the order, delay or repetition of what it hears."""
    _, said = play([OPEN, *events], **config)
    assert said == [[], *expected]


def test_a_rollout_from_open_to_closed_and_its_time():
    """Time in states is charged by hand here: worker 0 is busy 1..2, idle 2..3, trains 3..7, leaves at 8."""
    events = [
        OPEN,
        DRY,
        TRAINS,
        (4.0, report(1, 1, IDLE, 2)),
        (6.0, report(2, 1, IDLE, 2)),
        (7.0, report(0, 3, IDLE, 2, 1, WindowEnd.STOPPED)),
        (7.0, report(1, 2, LEARNING, 2)),
        (7.5, report(2, 2, LEARNING, 2)),
        (8.0, report(0, 4, LEARNING, 2, 1, WindowEnd.STOPPED)),
    ]
    before, _ = play(events[:-1])
    assert before.is_over and not before.is_closed
    state, said = play(events)
    assert said[4] == [(0, 2, "over"), (1, 2, "over"), (2, 1, "over")] and said[5:] == [[]] * 4
    assert state.is_closed and state.failure == "" and state.num_dropped == 0
    seconds = time_in_states(state, 0, 10.0)
    assert seconds == {BUSY: 1.0, IDLE: 2.0, TRAINING: 4.0, LEARNING: 3.0, LOST: 0.0}
    assert [sum(time_in_states(state, i, 10.0).values()) for i in range(3)] == [10.0] * 3
    again, actions = transition(state, Open(rollout=2, num_requests=1), 11.0)
    assert [(a.worker, a.state, a.time_s) for a in actions if isinstance(a, Change)] == [
        (i, BUSY, 11.0) for i in range(3)
    ]
    assert not again.is_closed and again.next_window == state.next_window


def test_a_lost_worker_ends_the_rollout_with_its_reason():
    state, _ = play([OPEN, (2.0, Lost(worker=1, rollout=1, reason="out of memory"))])
    assert state.is_over and state.failure == "worker 1: out of memory"
    assert state.workers[1].state is LOST and state.workers[0].state is BUSY
    state, actions = transition(state, report(1, 1, IDLE, 2), 3.0)
    assert actions == [] and state.num_dropped == 1
    for worker in (0, 2):
        state, _ = transition(state, report(worker, 1, LEARNING, 0), 4.0)
    assert state.is_closed


def test_an_empty_rollout_is_over_at_once_and_bad_settings_are_refused():
    state, said = play([(1.0, Open(rollout=1, num_requests=0))])
    assert state.is_over and said == [[(0, 1, "over"), (1, 1, "over"), (2, 1, "over")]]
    with pytest.raises(ValueError, match=r"min_idle: got 3 for 2 workers, expected between 1 and as many"):
        start(2, CoordinatorConfig(min_idle=3))
    with pytest.raises(ValueError, match=r"min_idle: got 0, expected >= 1 worker"):
        CoordinatorConfig(min_idle=0)


def test_messages_travel_as_json():
    messages = [
        report(3, 7, IDLE, 5, 2, WindowEnd.BUDGET),
        report(3, 8, TRAINING, 5, 4),
        Directive(worker=3, rollout=1, version=2, window_id=4),
        Directive(worker=3, rollout=1, version=3, is_over=True, failure="worker 1: gone"),
        Lost(worker=1, rollout=1, reason="gone"),
    ]
    assert [from_json(to_json(m)) for m in messages] == messages
    read = from_json(to_json(messages[0]))
    assert isinstance(read, Report) and isinstance(read.state, WorkerState) and isinstance(read.window_end, WindowEnd)
    with pytest.raises(ValueError, match="expected one of Report, Directive, Lost"):
        from_json('{"type": "Order"}')
    with pytest.raises(ValueError, match="as this release writes them"):
        from_json('{"type": "Lost", "worker": 1}')


def test_an_agent_takes_newer_directives_of_its_rollout_alone():
    a, _ = agents.turn_idle(Agent(worker=1, rollout=4), 3)
    grant = Directive(worker=1, rollout=4, version=2, window_id=9)
    for other in (
        dataclasses.replace(grant, rollout=3, is_over=True),
        dataclasses.replace(grant, worker=0),
        dataclasses.replace(grant, version=1, window_id=8),
        grant,
    ):
        a = agents.receive(a, other)
        a = agents.receive(a, grant)
        assert a.newest == grant and a.granted == 9 and not a.is_over
    a, said = agents.begin_window(a)
    assert (said.state, said.window_id, said.seq, said.num_done) == (TRAINING, 9, 2, 3) and a.may_train
    a = agents.receive(a, Directive(worker=1, rollout=4, version=3))
    assert not a.may_train
    a, said = agents.end_window(a, WindowEnd.STOPPED)
    assert (said.state, said.window_id, said.window_end) == (IDLE, 9, WindowEnd.STOPPED)
    assert agents.receive(a, dataclasses.replace(grant, version=4)).granted is None  # a window is had once
    a = agents.receive(a, Directive(worker=1, rollout=4, version=5, is_over=True, failure="worker 0: gone"))
    assert a.is_over and a.failure == "worker 0: gone" and a.granted is None


@dataclasses.dataclass
class Hand:
    """A worker of the simulated job."""

    agent: Agent
    requests: int = 0
    num_done: int = 0
    is_in_step: bool = False
    steps_after_stop: int = 0
    is_lost: bool = False
    has_left: bool = False


class Schedules(RuleBasedStateMachine):
    """Workers that follow `agent`, a coordinator that follows `transition`, and a network without any order.

    Messages are delivered in any order, some twice. Requests move between workers unseen by the coordinator. A rule is
    a burst of things that one kind of party does, in an order that a seed gives: schedules of 64 workers stay short.
    """

    @initialize(num_workers=st.one_of(st.integers(2, 4), st.integers(1, 64)), min_idle=st.integers(1, 3), seed=SEEDS)
    def begin(self, num_workers, min_idle, seed):
        self.now_s, self.opens = 0.0, 0
        self.state = start(num_workers, CoordinatorConfig(min_idle=min(min_idle, num_workers)))
        self.reports: list[Report | Lost] = []
        self.directives: list[Directive] = []
        self.windows: set[int] = set()
        self.open(random.Random(seed))

    def tell(self, event):
        self.state, actions = transition(self.state, event, self.now_s)
        self.directives += [action for action in actions if isinstance(action, Directive)]

    def open(self, rng):
        loads = [rng.choice([0, 1, 1, 2, 5]) for _ in self.state.workers]
        self.total, self.opens = sum(loads), self.opens + 1
        self.hands = [Hand(Agent(worker=i, rollout=self.opens), requests=n) for i, n in enumerate(loads)]
        self.tell(Open(rollout=self.opens, num_requests=self.total))

    def send(self, hand, step):
        hand.agent, message = step
        self.reports.append(message)

    def present(self, rng, wanted=lambda h: True):
        found = [h for h in self.hands if not h.is_lost and not h.has_left and wanted(h)]
        return rng.choice(found) if found else None

    @rule(seed=SEEDS, count=st.sampled_from([1, 5, 30]))
    def workers_go_on(self, seed, count):
        rng = random.Random(seed)
        for _ in range(count):
            if (hand := self.present(rng)) is not None:
                self.go_on(hand, rng)

    @rule(seed=SEEDS, count=st.sampled_from([1, 5]))
    def requests_change_hands(self, seed, count):
        """A worker without any takes one of a worker that has several."""
        rng = random.Random(seed)
        for _ in range(count):
            thief = self.present(rng, lambda h: h.agent.state in (IDLE, TRAINING) and not h.is_in_step)
            giver = self.present(rng, lambda h: h.requests > 1)
            if thief is not None and giver is not None:
                if thief.agent.state is TRAINING:
                    self.send(thief, agents.end_window(thief.agent, WindowEnd.WORK))
                self.send(thief, agents.turn_busy(thief.agent))
                giver.requests, thief.requests = giver.requests - 1, 1

    @rule(seed=SEEDS, count=st.sampled_from([1, 4, 64]), seconds=st.floats(0.0, 5.0))
    def messages_arrive(self, seed, count, seconds):
        rng = random.Random(seed)
        self.now_s += seconds
        for box, to in ((self.reports, self.tell), (self.directives, self.read)):
            for _ in range(min(count, len(box))):
                i = rng.randrange(len(box))
                to(box[i] if rng.random() < 0.2 else box.pop(i))

    def read(self, directive):
        hand = self.hands[directive.worker]
        hand.agent = agents.receive(hand.agent, directive)

    @rule(seed=SEEDS)
    def the_loop_recalls_and_releases(self, seed):
        rng = random.Random(seed)
        for worker in rng.sample(range(len(self.hands)), rng.randint(1, len(self.hands))):
            self.tell(Recall(worker=worker) if rng.random() < 0.5 else Release(worker=worker))

    @rule(seed=SEEDS, num=st.integers(1, 3))
    def requests_are_added(self, seed, num):
        """To a worker that surely has not left."""
        hand = self.present(random.Random(seed), lambda h: h.agent.state is BUSY)
        if hand is not None and not self.state.is_over:
            hand.requests, self.total = hand.requests + num, self.total + num
            self.tell(Added(rollout=self.opens, num_requests=num))

    @rule(seed=SEEDS)
    def a_worker_fails(self, seed):
        """Seldom, and with requests that nobody else has."""
        rng = random.Random(seed)
        hand = self.present(rng, lambda h: h.agent.state is BUSY and h.requests > 0)
        if hand is not None and rng.random() < 0.1:
            hand.is_lost = True
            self.reports.append(Lost(worker=hand.agent.worker, rollout=self.opens, reason="gone"))

    @precondition(lambda self: self.opens < 3)
    @rule(seed=SEEDS)
    def the_next_rollout_begins(self, seed):
        """Messages of the last one are still under way, and arrive during the next."""
        rng = random.Random(seed)
        old = [*self.reports, *self.directives]
        self.come_to_the_end()
        self.reports += [m for m in old if not isinstance(m, Directive)]
        self.directives += [m for m in old if isinstance(m, Directive)]
        self.open(rng)

    def go_on(self, hand, rng=None):
        """The next thing that this worker would do by itself."""
        a = hand.agent
        chance = 1.0 if rng is None else rng.random()
        if hand.is_lost or hand.has_left:
            return
        if a.state is TRAINING:
            self.train(hand, chance)
        elif a.is_over:
            self.send(hand, agents.leave(a))
            hand.has_left = True
        elif a.state is IDLE and a.granted is not None:
            assert a.granted not in self.windows, "a window was given twice"
            self.windows.add(a.granted)
            self.send(hand, agents.begin_window(a))
            hand.steps_after_stop = 0
        elif a.state is BUSY and hand.requests:
            hand.requests, hand.num_done = hand.requests - 1, hand.num_done + 1
        elif a.state is BUSY:
            self.send(hand, agents.turn_idle(a, hand.num_done))

    def train(self, hand, chance):
        """Begins a step or ends it; a directive may arrive in between."""
        if hand.is_in_step:
            hand.is_in_step = False
            hand.steps_after_stop += not hand.agent.may_train
        elif not hand.agent.may_train:
            self.send(hand, agents.end_window(hand.agent, WindowEnd.STOPPED))
        elif chance < 0.1:
            self.send(hand, agents.end_window(hand.agent, WindowEnd.BUDGET if chance < 0.05 else WindowEnd.FAILED))
        else:
            hand.is_in_step = True

    @invariant()
    def training_is_inside_the_workers_idle_time(self):
        for hand in self.hands:
            if hand.agent.state is TRAINING:
                assert hand.requests == 0 and hand.agent.num_done == hand.num_done
                assert hand.agent.window_id in self.windows and hand.steps_after_stop <= 1

    @invariant()
    def a_rollout_is_over_when_its_requests_are_done(self):
        assert sum(h.num_done + h.requests for h in self.hands) == self.total
        if self.state.is_over and not self.state.failure:
            assert sum(h.num_done for h in self.hands) == self.total

    @invariant()
    def time_adds_up(self):
        for i in range(len(self.state.workers)):
            assert sum(time_in_states(self.state, i, self.now_s).values()) == pytest.approx(self.now_s)

    def come_to_the_end(self):
        """From wherever the schedule stopped, workers that just go on come to the end: there is no deadlock."""
        rng = random.Random(len(self.reports))
        for _ in range(200):
            for box, to in ((self.reports, self.tell), (self.directives, self.read)):
                messages, box[:] = rng.sample(box, len(box)), []
                for message in messages:
                    to(message)
            if self.state.is_closed:
                break
            self.now_s += 1.0
            for hand in self.hands:
                self.go_on(hand)
        assert self.state.is_closed
        assert bool(self.state.failure) == any(h.is_lost for h in self.hands)
        assert self.state.failure or not any(h.requests for h in self.hands)

    def teardown(self):
        if hasattr(self, "hands"):
            self.come_to_the_end()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
