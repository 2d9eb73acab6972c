import jax.numpy as jnp
import numpy as np
import pytest

from tests.drafter.shapes import make
from tlt_jax.drafter.features import Recorded, make_reader
from tlt_jax.metrics import CompileCounter
from tlt_jax.models.transformer import forward


def sequences_of(lens, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Recorded(request_id=i, token_ids=rng.integers(0, 96, n).astype(np.int32), prompt_len=min(5, n - 1), step=3)
        for i, n in enumerate(lens)
    ]


def reference(sequence, feature_layers):
    config, _, params = make("eagle3") if feature_layers else make()
    tokens = jnp.asarray(sequence.token_ids)[None]
    out = forward(params, config.target, tokens, jnp.arange(len(tokens[0]))[None], feature_layers=feature_layers)
    return out.hidden[0, :-1], [x[0, :-1] for x in out.features]


@pytest.mark.parametrize("feature_layers", [(), (0, 1, 2)])
def test_packed_sequences_have_the_features_of_each_alone(feature_layers):
    """F9: sequences of one row do not see each other; one longer than a forward gets a forward of its own."""
    config, _, params = make("eagle3") if feature_layers else make()
    sequences = sequences_of([40, 7, 100, 2, 300, 33])
    read = make_reader(config.target, feature_layers, batch_tokens=256)
    traces = {t.request_id: t for t in read(params, sequences, policy_version=4)}
    assert sorted(traces) == list(range(6))
    for sequence in sequences:
        trace = traces[sequence.request_id]
        hidden, features = reference(sequence, feature_layers)
        assert (trace.start, trace.step, trace.policy_version, trace.prompt_len) == (0, 3, 4, sequence.prompt_len)
        assert trace.features.dtype == jnp.bfloat16 and len(trace.features) == len(sequence.token_ids) - 1
        want = np.concatenate(features, axis=-1) if feature_layers else hidden
        np.testing.assert_allclose(trace.features.astype(np.float32), want, rtol=2**-7, atol=1e-2)
        if feature_layers:
            np.testing.assert_allclose(trace.hidden.astype(np.float32), hidden, rtol=2**-7, atol=1e-2)
        else:
            assert trace.hidden is None


def test_positions_long_before_the_response_are_dropped():
    """What is kept is what the whole trace has there, and owns its memory."""
    config, _, params = make()
    (sequence,) = sequences_of([40])
    (whole,) = make_reader(config.target, batch_tokens=256)(params, [sequence])
    (cut,) = make_reader(config.target, batch_tokens=256, context_len=2)(params, [sequence])
    assert (cut.start, len(cut.features)) == (2, 37)
    np.testing.assert_array_equal(cut.features, whole.features[2:])
    assert cut.features.base is None and cut.num_bytes == 40 * 4 + 37 * 32 * 2


def test_sequences_of_any_length_up_to_a_row_share_one_program():
    config, _, params = make()
    read = make_reader(config.target, batch_tokens=256)
    list(read(params, sequences_of([10, 20, 128])))
    compiles = CompileCounter()
    list(read(params, sequences_of([5, 50, 77, 128, 99, 3], seed=1)))
    assert compiles.read()["compile/count"] == 0
    compiles.close()
