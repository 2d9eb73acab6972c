"""Presets, their validation, and the sampling laws an algorithm can learn from."""

import dataclasses

import pytest

from tlt_jax.rl.algorithms import PRESETS, AlgorithmConfig, check_sampling, preset
from tlt_jax.types import SamplingParams


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "grpo",
            {
                "advantage": "group_norm",
                "aggregation": "seq_mean",
                "clip_high": 0.2,
                "kl_coef": 0.04,
                "kl_estimator": "k3",
            },
        ),
        ("dr_grpo", {"advantage": "group_mean", "aggregation": "constant", "kl_coef": 0.0}),
        (
            "dapo",
            {
                "aggregation": "token_mean",
                "clip_low": 0.2,
                "clip_high": 0.28,
                "zero_std": "drop",
                "overlong_buffer": 0.2,
            },
        ),
        ("rloo", {"advantage": "rloo", "aggregation": "seq_sum", "kl_estimator": "k1", "kl_in": "reward"}),
        ("gspo", {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
        ("reinforce_pp", {"advantage": "group_mean_batch_norm", "aggregation": "token_mean", "kl_estimator": "k2"}),
    ],
)
def test_presets_pin_their_published_fields(name, fields):
    algo = preset(name)
    assert {key: getattr(algo, key) for key in fields} == fields


def test_every_preset_is_listed_and_hashable():
    assert set(PRESETS) == {"grpo", "dr_grpo", "dapo", "rloo", "gspo", "reinforce_pp"}
    assert len({hash(preset(name)) for name in PRESETS}) == 6


def test_overrides_replace_preset_fields_alone():
    assert preset("grpo", clip_high=0.3) == dataclasses.replace(preset("grpo"), clip_high=0.3)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'dr_grpo'"):
        preset("drgrpo")
    with pytest.raises(ValueError, match="did you mean 'clip_high'"):
        preset("grpo", clip_hgih=0.3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("advantage", "gae"),
        ("clip_low", 1.0),
        ("clip_high", 0.0),
        ("dual_clip", 0.5),
        ("kl_coef", -1.0),
        ("tis_cap", 0.5),
        ("num_iterations", 0),
        ("overlong_buffer", 1.5),
        ("dynamic_sampling", True),
    ],
)
def test_fields_out_of_range_name_themselves(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}: got"):
        AlgorithmConfig(**{field: value})


def test_kl_needs_an_estimator():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        AlgorithmConfig(kl_coef=0.1, kl_estimator="none")


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 2}, {"min_p": 0.1}])
def test_truncated_sampling_needs_importance_weights(cut):
    """B2: a rollout law that the learner cannot recompute is refused, unless weights correct for it."""
    with pytest.raises(ValueError, match="tis_cap"):
        check_sampling(preset("grpo"), SamplingParams(**cut))
    assert check_sampling(preset("grpo", tis_cap=2.0), SamplingParams(**cut)) is None
    assert check_sampling(preset("grpo"), SamplingParams(temperature=0.6)) is None
