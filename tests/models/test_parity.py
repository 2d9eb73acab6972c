"""Logits equal those of transformers, as `make parity` recorded them; the two real models equal their records too."""

import json
import pathlib

import numpy as np
import pytest

from benchmarks import parity_models as tiny
from tlt_jax.models import hf
from tlt_jax.models.config import ModelConfig

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_logits_equal_transformers_with_and_without_cache(name, tmp_path):
    """D5, D6, D7, D8 in the whole model: rope scaling, q/k norm, rotation and head width as transformers has them."""
    expected, valid = np.load(GOLDEN / "parity.npz")[name], tiny.valid_mask()
    tiny.write_model(tmp_path / "model", tiny.FAMILIES[name])
    config, params = hf.load_hf(tmp_path / "model")
    tokens = tiny.ragged_batch(config)
    for logits in (tiny.logits_uncached(params, config, tokens), tiny.logits_cached(params, config, tokens)):
        np.testing.assert_allclose(np.asarray(logits)[valid], expected[valid], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_reads_the_config_that_transformers_writes(name):
    """D12: transformers 5 moves rope_theta into rope_parameters; the same configuration comes out."""
    written = json.loads((GOLDEN / "parity.json").read_text())["configs"][name]
    assert "rope_theta" not in written and written["rope_parameters"]["rope_theta"] == tiny.FAMILIES[name].rope_theta
    assert ModelConfig.from_hf(written) == tiny.FAMILIES[name]
