"""From a configuration to a policy."""

from __future__ import annotations

from tlt_jax.bandit.arm_model import make_arm_model
from tlt_jax.bandit.beg_mab import make_beg_mab
from tlt_jax.bandit.policy import BanditConfig
from tlt_jax.strategy import Policy


def make_policy(config: BanditConfig, platform: str = "cpu") -> Policy:
    """The policy that a configuration names.

    Args:
      config: settings.
      platform: "cpu" or "gpu"; picks the arms where the configuration says "auto", and first guesses of costs.
    """
    table = config.table(platform)
    if config.policy == "beg_mab":
        return make_beg_mab(config, table)
    return make_arm_model(config, table, platform)
