"""Response lengths by law."""

import numpy as np

from tlt_jax.rl.lengths import cut_to_law, draw_len
from tlt_jax.types import Request, SamplingParams


def test_lengths_have_the_quantiles_of_the_law():
    """Scaled to a cap of 32,768, the law is itself; a tenth of the cap is a tenth of all lengths."""
    lens = np.array([draw_len("reasoning", 32_768, 0, i) for i in range(20_000)])
    np.testing.assert_allclose(np.quantile(lens, [0.5, 0.9, 0.99]), [792, 3_432, 12_607], rtol=0.1)
    assert lens.min() >= 64 and lens.max() <= 32_768
    short = np.array([draw_len("reasoning", 3_277, 0, i) for i in range(2_000)])
    np.testing.assert_allclose(short, lens[:2_000] / 10, atol=1.0)


def test_a_length_belongs_to_seed_and_request():
    assert draw_len("reasoning", 1000, 3, 7) == draw_len("reasoning", 1000, 3, 7)
    assert len({draw_len("reasoning", 1000, seed, 7) for seed in range(5)}) > 1
    assert draw_len("reasoning", 1, 0, 0) == 1


def test_requests_stop_at_their_length_alone():
    sampling = SamplingParams(max_tokens=512, temperature=0.7, stop=("x",), stop_token_ids=(5,))
    requests = [Request(request_id=i, prompt_id=0, prompt_ids=(1,), sampling=sampling) for i in range(4)]
    cut = cut_to_law(requests, "reasoning", 0)
    assert [r.sampling.max_tokens for r in cut] == [draw_len("reasoning", 512, 0, i) for i in range(4)]
    assert all(r.sampling.ignore_eos and r.sampling.stop == r.sampling.stop_token_ids == () for r in cut)
    assert all(r.sampling.temperature == 0.7 for r in cut) and [r.request_id for r in cut] == [0, 1, 2, 3]
    assert cut_to_law(requests, "", 0) == requests
