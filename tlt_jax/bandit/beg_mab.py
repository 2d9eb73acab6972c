"""BEG-MAB, the paper's bandit: bucketed, epsilon-greedy, median reward.

1. The live batch picks the bucket, and with it the arms. A bucket of one arm returns it, without a draw.
2. With probability epsilon a random arm of the bucket; else the arm with the best median reward over its window, the
   first of equals. An arm never played counts as +inf, so each is played once before any is judged.
3. Reward = mean committed tokens x live batch / seconds of a round.

Departures: a live batch below the first threshold is an error (the released code falls back to all arms); windows are
kept per (bucket, arm), since an arm may be in several buckets; arms that need a drafter are left out while there is
none, and `plain` is played if none is left. Draws depend on (seed, number of the choice) alone, so that a schedule can
be repeated and resumed.

References:
  "Taming the Long Tail: Efficient Reasoning RL Training with Adaptive Drafter", arXiv 2511.16665.
"""

from __future__ import annotations

import functools
import statistics
from typing import NamedTuple

from tlt_jax.bandit.policy import BanditConfig, check_saved_by, reward_tokens_per_s
from tlt_jax.bandit.strategies import ArmTable
from tlt_jax.strategy import PLAIN, Choice, JsonDict, Outcome, Policy, Situation

NAME = "beg_mab"
_MASK = (1 << 64) - 1


class Window(NamedTuple):
    """The newest rewards of one arm in one bucket."""

    rewards: tuple[float, ...] = ()
    median: float = float("inf")


class BegMabState(NamedTuple):
    num_choices: int  # of those that could draw
    windows: tuple[tuple[Window, ...], ...]  # [bucket][arm], as in the table


def make_beg_mab(config: BanditConfig, table: ArmTable) -> Policy:
    """The bandit over `table`."""
    return Policy(
        arms=table.at,
        init=functools.partial(_init, table),
        select=functools.partial(_select, config, table),
        update=functools.partial(_update, config, table),
        to_json=functools.partial(_to_json, table),
        from_json=functools.partial(_from_json, config, table),
    )


def _init(table: ArmTable) -> BegMabState:
    return BegMabState(0, tuple((Window(),) * len(arms) for arms in table.arms))


def _select(
    config: BanditConfig, table: ArmTable, state: BegMabState, situation: Situation
) -> tuple[Choice, BegMabState]:
    bucket = table.bucket(situation.live_batch)
    arms = [(s, w) for s, w in zip(table.arms[bucket], state.windows[bucket], strict=True) if situation.allows(s)]
    if not arms:
        return Choice(PLAIN), state
    if len(arms) == 1:
        return Choice(arms[0][0]), state
    next_state = state._replace(num_choices=state.num_choices + 1)
    if uniform(config.seed, state.num_choices, 0) < config.epsilon:
        index = int(uniform(config.seed, state.num_choices, 1) * len(arms))
        return Choice(arms[index][0], is_probe=True), next_state
    return Choice(max(arms, key=lambda arm: arm[1].median)[0]), next_state


def _update(config: BanditConfig, table: ArmTable, state: BegMabState, outcome: Outcome) -> BegMabState:
    if outcome.committed.shape[1] == 0:
        return state
    bucket = table.bucket(outcome.situation.live_batch)
    arms, strategy = table.arms[bucket], outcome.choice.strategy
    if strategy not in arms:
        if strategy == PLAIN:  # played because no arm could be
            return state
        raise ValueError(
            f"outcome at live batch {outcome.situation.live_batch}: got {strategy.name}, expected one of its arms "
            f"{[s.name for s in arms]}; report the situation that the choice was made in"
        )
    windows, arm = state.windows[bucket], arms.index(strategy)
    rewards = (windows[arm].rewards + (reward_tokens_per_s(outcome, config),))[-config.window :]
    windows = windows[:arm] + (Window(rewards, statistics.median(rewards)),) + windows[arm + 1 :]
    return state._replace(windows=state.windows[:bucket] + (windows,) + state.windows[bucket + 1 :])


def _to_json(table: ArmTable, state: BegMabState) -> JsonDict:
    groups = zip(table.thresholds, table.arms, state.windows, strict=True)
    rewards = {
        str(threshold): {s.name: list(w.rewards) for s, w in zip(arms, windows, strict=True)}
        for threshold, arms, windows in groups
    }
    return {"policy": NAME, "num_choices": state.num_choices, "rewards": rewards}


def _from_json(config: BanditConfig, table: ArmTable, saved: JsonDict) -> BegMabState:
    """Windows of arms that the table no longer has are dropped, new arms start unplayed."""
    check_saved_by(NAME, saved)
    windows = []
    for threshold, arms in zip(table.thresholds, table.arms, strict=True):
        by_name = saved["rewards"].get(str(threshold), {})
        rewards = [tuple(float(r) for r in by_name.get(s.name, ()))[-config.window :] for s in arms]
        windows.append(tuple(Window(r, statistics.median(r)) if r else Window() for r in rewards))
    return BegMabState(int(saved["num_choices"]), tuple(windows))


def uniform(seed: int, counter: int, stream: int) -> float:
    """A number in [0, 1) that depends on its arguments alone, the same on every machine and version.

    References:
      Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the mixing function).
    """
    z = 0
    for word in (seed, counter, stream):
        z = (z + word + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) * 2.0**-53
