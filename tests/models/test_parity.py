"""Logits equal those of transformers, as `make parity` recorded them; the two real models equal their records too."""

import json
import pathlib

import numpy as np
import pytest

from benchmarks import parity_models as tiny
from tlt_jax.models import hf
from tlt_jax.models.config import ModelConfig

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def assert_equals_transformers(name, tmp_path, compute):
    """Logits of the ragged batch by `compute(params, config, tokens)`, from the directory we write, within 2e-5."""
    expected, valid = np.load(GOLDEN / "parity.npz")[name], tiny.valid_mask()
    tiny.write_model(tmp_path / "model", tiny.FAMILIES[name])
    config, params = hf.load_hf(tmp_path / "model")
    logits = np.asarray(compute(params, config, tiny.ragged_batch(config)))
    np.testing.assert_allclose(logits[valid], expected[valid], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_logits_equal_transformers(name, tmp_path):
    """D5, D6, D7, D8 in the whole model: rope scaling, q/k norm, rotation and head width as transformers has them."""
    assert_equals_transformers(name, tmp_path, tiny.logits_uncached)


@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen2", "qwen2_yarn", "qwen3"])
def test_logits_from_a_cache_equal_transformers(name, tmp_path):
    """The same from a cache with rows of unequal length; the other families differ in nothing that the cache sees."""
    assert_equals_transformers(name, tmp_path, tiny.logits_cached)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_reads_the_config_that_transformers_writes(name):
    """D12: transformers 5 moves rope_theta into rope_parameters; the same configuration comes out."""
    written = json.loads((GOLDEN / "parity.json").read_text())["configs"][name]
    assert "rope_theta" not in written and written["rope_parameters"]["rope_theta"] == tiny.FAMILIES[name].rope_theta
    assert ModelConfig.from_hf(written) == tiny.FAMILIES[name]
