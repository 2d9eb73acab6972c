"""Configurations: right numbers from HF's fields, and refusals before anything is loaded."""

import numpy as np
import pytest

from tlt_jax.models import layers
from tlt_jax.models.config import ModelConfig, RopeScaling, rope_frequencies

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
}


def llama3_config(head_dim: int, factor: float) -> ModelConfig:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return ModelConfig.from_hf(LLAMA | {"head_dim": head_dim, "rope_theta": 5e5, "rope_scaling": scaling})


def test_llama3_rope_of_head_64_and_factor_32():
    """D5: pairs 0-14 kept, 15-17 blended, 18-31 divided by the factor, under the key rope_type."""
    scaled, attention_factor = rope_frequencies(llama3_config(64, 32.0))
    plain = 5e5 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(scaled[:15], plain[:15], rtol=1e-6)
    assert np.all(scaled[15:18] < plain[15:18] * 0.999) and np.all(scaled[15:18] > plain[15:18] / 32 * 1.001)
    np.testing.assert_allclose(scaled[18:], plain[18:] / 32, rtol=1e-6)
    np.testing.assert_allclose(scaled[[15, 31]], [0.00129055, 9.41831e-8], rtol=1e-5)
    assert attention_factor == 1.0


def test_llama3_rope_of_head_128_and_factor_8():
    """D5: pairs 0-28 kept, 29-34 blended, 35-63 divided by 8."""
    scaled, _ = rope_frequencies(llama3_config(128, 8.0))
    ratio = 5e5 ** (-np.arange(64) / 64) / scaled
    np.testing.assert_allclose(ratio[:29], 1.0, rtol=1e-6)
    assert np.all((ratio[29:35] > 1.001) & (ratio[29:35] < 7.999))
    np.testing.assert_allclose(ratio[35:], 8.0, rtol=1e-6)


def test_old_key_type_is_read_too():
    """D5: `type` is the older spelling of `rope_type`."""
    config = ModelConfig.from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    np.testing.assert_allclose(rope_frequencies(config)[0] * 4, 1e4 ** (-np.arange(8) / 8), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope_type: got 'longrope', expected one of",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "got type 'yarn' without 'factor'"),
        ({"model_type": "mixtral"}, "model_type: got 'mixtral', expected one of llama, qwen2, qwen3"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096},
            "sliding window: got window 4096",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer types .'sliding_attention'."),
        ({"mlp_bias": True}, "mlp_bias: got true, expected false"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
        ({"num_hidden_layers": None}, "got no 'num_hidden_layers'"),
        ({"num_key_value_heads": 3}, "got 4 query heads and 3 key/value heads, expected the first to be a multiple"),
    ],
)
def test_what_the_decoder_lacks_is_refused(change, message):
    """D5: an unknown rope type, model, window or activation is an error, never a silent default."""
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(LLAMA | change)


def test_a_sliding_window_that_is_switched_off_is_accepted():
    """Qwen2 files carry a window with use_sliding_window false."""
    config = ModelConfig.from_hf(LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096})
    assert config.attention_bias and not config.output_bias


def test_yarn_attention_factor():
    """D6: 0.1 ln(4) + 1 on cos and sin, and thus on the logits of attention squared."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = ModelConfig.from_hf(LLAMA | {"rope_scaling": yarn})
    assert rope_frequencies(config)[1] == pytest.approx(1.13863, abs=1e-5)
    cos, _ = layers.rope_tables(config, np.zeros((1, 1), np.int32))
    np.testing.assert_allclose(cos, 1.13863, atol=1e-5)


def test_rotation_is_half_split():
    """D7: q = [1,0,0,0] at position 1 turns into the pair (0, 2), not into (0, 1)."""
    config = ModelConfig.from_hf(LLAMA | {"head_dim": 4})
    cos, sin = layers.rope_tables(config, np.ones((1, 1), np.int32))
    rotated = layers.apply_rope(np.asarray([[[[1.0, 0, 0, 0]]]], np.float32), cos, sin)
    np.testing.assert_allclose(rotated[0, 0, 0], [0.5403, 0, 0.8415, 0], atol=1e-4)


@pytest.mark.parametrize("place", ["rope_theta", "rope_parameters"])
def test_rope_theta_in_its_old_and_new_place(place):
    """D12: both give 1e6."""
    fields = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    fields[place] = 1e6 if place == "rope_theta" else {"rope_theta": 1e6, "rope_type": "default"}
    assert ModelConfig.from_hf(fields).rope_theta == 1e6


def test_no_rope_theta_is_an_error():
    """D12: no silent 10000."""
    with pytest.raises(ValueError, match=r"rope_theta: got none"):
        ModelConfig.from_hf({k: v for k, v in LLAMA.items() if k != "rope_theta"})


def test_biases_of_each_family():
    """D13: q, k and v of Qwen2 have biases and o has none; Llama has none unless attention_bias, then o too."""
    of = {
        name: ModelConfig.from_hf(LLAMA | {"model_type": name, "head_dim": 16}) for name in ("llama", "qwen2", "qwen3")
    }
    biased = ModelConfig.from_hf(LLAMA | {"attention_bias": True})
    flags = [(c.attention_bias, c.output_bias) for c in (*of.values(), biased)]
    assert flags == [(False, False), (True, False), (False, False), (True, True)]


def test_stop_ids_come_from_both_files():
    """B12: every EOS id of generation_config.json counts, and that of config.json."""
    config = ModelConfig.from_hf(LLAMA | {"eos_token_id": 5}, {"eos_token_id": [2, 3]})
    assert config.eos_token_ids == (2, 3, 5)
    assert ModelConfig.from_hf(config.to_hf(), None).eos_token_ids == (2, 3, 5)


def test_to_hf_is_the_inverse():
    """D12: a configuration survives its own config.json, with only the rope keys that its scaling has."""
    for scaling in (None, RopeScaling(kind="linear", factor=2.0), llama3_config(16, 8.0).rope_scaling):
        config = ModelConfig.from_hf(LLAMA, rope_scaling=scaling)
        assert ModelConfig.from_hf(config.to_hf()) == config
    assert ModelConfig.from_hf(LLAMA, rope_scaling=RopeScaling(kind="linear", factor=2.0)).to_hf()["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 2.0,
    }
