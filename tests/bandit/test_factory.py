"""Both policies behind one interface, judged against the best fixed arm of each phase of simulated rollouts."""

import numpy as np
import pytest

from tests.bandit.simulator import World, play, steady
from tlt_jax.bandit.factory import make_policy
from tlt_jax.bandit.policy import BanditConfig
from tlt_jax.strategy import LAYER_DRAFTER, Policy

CPU_PHASES = [(b, 400.0) for b in (32, 16, 8, 4, 2, 1)]
GPU_PHASES = [(b, 600.0) for b in (128, 64, 32, 16, 8, 4, 2, 1)]
GPU = {"read_s": 0.012, "token_s": 3e-5, "step_s": 6e-4}


def drifting(drafter, tokens):
    """Acceptance that wanders with the text: 0.60 to 0.90 for the drafter, 0.10 to 0.60 for copies."""
    if drafter == LAYER_DRAFTER:
        return 0.75 + 0.15 * np.sin(tokens / 400.0)
    return 0.35 + 0.25 * np.sin(tokens / 250.0)


WORLDS = {
    "drifting": ("cpu", World(drifting), CPU_PHASES),
    "noisy": ("cpu", World(drifting, noise=0.2, spike_frac=0.05), CPU_PHASES),
    "hopeless": ("cpu", World(steady(0.0, 0.0)), CPU_PHASES),
    "copies": ("cpu", World(steady(0.3, 0.8)), CPU_PHASES),
    "gpu": ("gpu", World(drifting, **GPU), GPU_PHASES),
}


def regrets(policy_name: str, world_name: str, num_seeds: int = 2) -> tuple[float, float]:
    """Regret of a first rollout and of the next one, which has new weights; means over seeds."""
    platform, world, phases = WORLDS[world_name]
    first, second = [], []
    for seed in range(num_seeds):
        config = BanditConfig(policy=policy_name, seed=seed)
        policy, table = make_policy(config, platform), config.table(platform)
        played, state = play(policy, policy.init(), world, table, phases, rng=np.random.default_rng(seed))
        again, _ = play(policy, state, world, table, phases, rng=np.random.default_rng(seed + 100), versions=(1, 1))
        first.append(played.regret_frac)
        second.append(again.regret_frac)
    return float(np.mean(first)), float(np.mean(second))


@pytest.mark.parametrize(
    ("world", "model", "beg_mab"),
    [
        # Most regret of the model, least of BEG-MAB, in the first rollout; the live batch falls from 32 (or 128) to 1.
        ("drifting", 0.025, 0.025),
        ("noisy", 0.040, 0.030),
        ("hopeless", 0.010, 0.060),
        ("copies", 0.025, 0.050),
        ("gpu", 0.050, 0.120),
    ],
)
def test_regret_against_the_best_fixed_arm_of_each_phase(world, model, beg_mab):
    """F11 for "hopeless": what never pays is not used."""
    ours, ours_next = regrets("model", world)
    papers, papers_next = regrets("beg_mab", world)
    assert ours < model
    assert beg_mab < papers < 0.25
    assert ours_next < model
    assert papers_next < papers  # windows are kept: what was learnt in the first rollout counts in the second


def test_the_same_seed_plays_the_same_rollout():
    assert regrets("model", "drifting", 1) == regrets("model", "drifting", 1)
    assert regrets("beg_mab", "drifting", 1) == regrets("beg_mab", "drifting", 1)


def test_either_policy_has_the_engines_interface():
    for name, saved_as in (("model", "model"), ("beg_mab", "beg_mab")):
        policy = make_policy(BanditConfig(policy=name))
        assert isinstance(policy, Policy)
        state = policy.init()
        assert policy.to_json(state)["policy"] == saved_as
        assert policy.to_json(policy.from_json(policy.to_json(state))) == policy.to_json(state)
    assert make_policy(BanditConfig(), "gpu").init().evidence.trials.shape == (13, 15)
