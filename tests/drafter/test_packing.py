import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.drafter.shapes import loss_and_grads, make
from tlt_jax.drafter.config import LossConfig
from tlt_jax.drafter.loss import count_rows, draft_loss
from tlt_jax.drafter.packing import Window, WindowConfig, cut_windows, fill_frac, first_fit, make_batches
from tlt_jax.types import FeatureTrace


def make_trace(num_tokens, prompt_len, width=32, start=0, stop=None, seed=0, **fields):
    """Token i is 10 + i and feature t starts with t, so that a test sees what stands where."""
    rng = np.random.default_rng(seed)
    stop = num_tokens - 1 if stop is None else stop
    features = rng.standard_normal((stop - start, width), np.float32)
    features[:, 0] = np.arange(start, stop)
    tokens = 10 + np.arange(num_tokens, dtype=np.int32)
    return FeatureTrace(
        request_id=seed, token_ids=tokens, prompt_len=prompt_len, start=start, features=features, **fields
    )


def test_supervised_rows_and_labels_of_six_tokens():
    """F1: 6 tokens, prompt 3: rows 2 and 3 with labels t4 and t5. F2: rows 4 and 5 are not supervised."""
    (window,) = cut_windows(make_trace(6, 3), WindowConfig(row_len=8, context_len=4))
    (batch,) = make_batches([window], 1, 1, 8)
    assert batch.mask[0, 0].tolist() == [False, False, True, True, False, False, False, False]
    assert batch.tokens[0, 0].tolist() == [11, 12, 13, 14, 15, 0, 0, 0]  # token t+1 in row t
    rows = np.flatnonzero(batch.mask[0, 0])
    assert batch.tokens[0, 0, rows + 1].tolist() == [14, 15]  # labels t4, t5
    assert batch.features[0, 0, rows + 1, 0].tolist() == [3, 4]  # and f3, f4
    assert batch.positions[0, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert batch.segment_ids[0, 0].tolist() == [1] * 5 + [0] * 3
    assert cut_windows(make_trace(6, 3, stop=6), WindowConfig(row_len=8, context_len=4))[0].last == 4


def test_rows_without_a_label_have_no_gradient():
    """F2: 6 tokens, prompt 3: what goes into rows 4 and 5, and into padding, has none; rows 2 and 3 have."""
    config, draft_params, target_params = make()
    (window,) = cut_windows(make_trace(6, 3), WindowConfig(row_len=8, context_len=4))
    batch = jax.tree.map(lambda x: x[0], next(make_batches([window], 1, 1, 8)))
    loss = LossConfig(num_steps=2, chunk_rows=3)
    counts = count_rows(batch.mask, batch.segment_ids, 2)

    @jax.jit
    def gradient_of_inputs(noise_BTD):
        def value(noise_BTD):
            return draft_loss(draft_params, target_params, config, loss, batch, counts, None, noise_BTD)[0]

        return jax.grad(value)(noise_BTD)

    grads_TD = gradient_of_inputs(jnp.zeros((1, 8, 32)))[0]
    assert np.any(grads_TD[2]) and np.any(grads_TD[3]) and not np.any(grads_TD[4:])


@settings(max_examples=40, deadline=None)
@given(
    prompt_len=st.integers(1, 9), response_len=st.integers(0, 40), start=st.integers(0, 3), context=st.integers(0, 5)
)
def test_windows_supervise_every_row_of_the_response_once(prompt_len, response_len, start, context):
    n = prompt_len + response_len
    trace = make_trace(n, prompt_len, start=min(start, n - 1))
    windows = cut_windows(trace, WindowConfig(row_len=9, context_len=context))
    supervised = [t for w in windows for t in range(w.first, w.last)]
    assert supervised == list(range(max(prompt_len - 1, trace.start), n - 2))
    for w in windows:
        assert w.num_rows <= 9 and w.last < w.stop <= n - 1
        assert w.start == max(trace.start, w.first - context)


def test_first_fit():
    assert first_fit([5, 4, 3, 6, 2, 1], 8) == [[0, 2], [1, 4, 5], [3]]
    assert first_fit([], 8) == []
    with pytest.raises(ValueError, match="at most 8"):
        first_fit([9], 8)


def test_batches_have_one_shape_and_positions_start_again():
    traces = [make_trace(n, 2, seed=n) for n in (5, 7, 4, 9)]
    windows = [w for t in traces for w in cut_windows(t, WindowConfig(row_len=10, context_len=1))]
    batches = list(make_batches(windows, 1, 2, 10))
    assert [b.tokens.shape for b in batches] == [(1, 2, 10)] * 2
    assert batches[0].segment_ids[0].tolist() == [[1] * 4 + [2] * 6, [1] * 3 + [0] * 7]
    assert batches[0].positions[0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert sum(int(b.mask.sum()) for b in batches) == 2 + 4 + 1 + 6
    padded = list(make_batches(windows, 1, 2, 10, packed=False))
    assert fill_frac(batches[0]) == 13 / 20 > fill_frac(padded[0]) == 10 / 20


def test_packed_windows_train_as_each_alone_and_padding_counts_for_nothing():
    """F9: loss and gradients of a packed row equal those of its windows alone (1e-5). F2: pad values change nothing."""
    config, draft_params, target_params = make()
    loss = LossConfig(num_steps=2, chunk_rows=3)
    traces = [make_trace(n, p, seed=n) for n, p in ((5, 2), (6, 1))]
    windows = [w for t in traces for w in cut_windows(t, WindowConfig(row_len=10, context_len=4))]
    (packed,) = make_batches(windows, 1, 2, 10)
    assert packed.segment_ids[0].tolist() == [[1] * 4 + [2] * 5 + [0], [0] * 10]
    alone = [next(make_batches([w], 1, 2, 10)) for w in windows]
    counts = count_rows(packed.mask, packed.segment_ids, 2)

    def run(batch):
        return loss_and_grads(
            draft_params, target_params, config, loss, jax.tree.map(lambda x: x[0], batch), counts, None
        )

    (value, _), (grads, _) = run(packed)
    parts = [run(batch) for batch in alone]
    np.testing.assert_allclose(value, sum(v for (v, _), _ in parts), rtol=1e-5)
    summed = jax.tree.map(jnp.add, *(g for _, (g, _) in parts))
    for got, want in zip(jax.tree.leaves(summed), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    is_pad = packed.segment_ids == 0
    assert is_pad.sum() == 11
    garbled = packed.replace(
        features=np.where(is_pad[..., None], np.float32(9.0), packed.features),
        tokens=np.where(is_pad, 95, packed.tokens),
    )
    (garbled_value, _), (garbled_grads, _) = run(garbled)
    assert float(garbled_value) == float(value)
    for got, want in zip(jax.tree.leaves(garbled_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_array_equal(got, want)


def test_bad_windows_and_traces_are_refused():
    with pytest.raises(ValueError, match="leaves at least two rows"):
        WindowConfig(row_len=8, context_len=7)
    with pytest.raises(ValueError, match="inside the sequence"):
        make_trace(5, 2, stop=6)
    with pytest.raises(ValueError, match="as many of both"):
        make_trace(5, 2, hidden=np.zeros((3, 32)))
    assert Window(make_trace(5, 2), 1, 4, 2, 3).num_rows == 3
