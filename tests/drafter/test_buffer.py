import threading

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.drafter import buffer_file
from tlt_jax.drafter.buffer import BufferConfig, DataBuffer
from tlt_jax.drafter.packing import WindowConfig
from tlt_jax.types import FeatureTrace

WINDOW = WindowConfig(row_len=8, context_len=2)


def draw(buffer, num_rows, seed=0):
    return buffer.draw(num_rows, WINDOW, np.random.default_rng(seed))


def make_trace(request_id, response_len, step, version=0, hidden=False):
    n = 3 + response_len
    rng = np.random.default_rng(request_id)
    features = rng.standard_normal((n - 1, 4)).astype(jnp.bfloat16)
    return FeatureTrace(
        request_id=request_id,
        token_ids=rng.integers(0, 50, n).astype(np.int32),
        prompt_len=3,
        features=features,
        hidden=features[:, :2] if hidden else None,
        step=step,
        policy_version=version,
    )


def filled(lens_by_step, **config):
    buffer = DataBuffer(BufferConfig(**config))
    for step, lens in enumerate(lens_by_step):
        buffer.start_step(step)
        for i, n in enumerate(lens):
            buffer.add(make_trace(100 * step + i, n, step, version=step))
    return buffer


def test_one_step_off():
    """This step's responses and the long ones of the last: nothing older, nothing short. F8: each trace says which
    policy version made its features."""
    buffer = filled([[40, 50], [4, 8, 12, 30], [5, 6]], long_quantile=0.75)
    assert [(t.step, t.response_len) for t in buffer.traces] == [(1, 30), (2, 5), (2, 6)]
    assert {t.policy_version for t in buffer.traces} == {1, 2}
    with pytest.raises(ValueError, match="start_step first"):
        buffer.add(make_trace(0, 5, step=3))


def test_memory_is_bounded_oldest_and_shortest_go_first():
    assert make_trace(0, 10, 0).num_bytes == 28 + 12 * 10
    buffer = filled([[10, 30], [10, 12, 3]], long_quantile=0.0, max_bytes=780)
    assert [(t.step, t.response_len) for t in buffer.traces] == [(0, 30), (1, 10), (1, 12), (1, 3)]
    assert buffer.num_evicted == 1  # the shorter one of step 0
    buffer.add(make_trace(9, 20, 1))
    assert [(t.step, t.response_len) for t in buffer.traces] == [(1, 10), (1, 12), (1, 3), (1, 20)]
    buffer.add(make_trace(10, 14, 1))
    assert [(t.step, t.response_len) for t in buffer.traces] == [(1, 12), (1, 20), (1, 14)]
    assert buffer.num_bytes <= buffer.config.max_bytes


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (0.25, 0.25), (0.75, 0.75), (1.0, 1.0)])
def test_the_share_of_long_responses_is_as_asked(share, expected):
    buffer = filled([[400] * 4, [100] * 16], long_share=share)
    windows = draw(buffer, 400)
    rows = {is_old: sum(w.num_rows for w in windows if (w.trace.step == 0) == is_old) for is_old in (True, False)}
    assert abs(rows[True] / (rows[True] + rows[False]) - expected) < 0.03
    assert 400 <= rows[True] + rows[False] < 420


def test_windows_come_from_the_whole_response_and_each_at_most_once():
    buffer = filled([[], [40]])
    windows = draw(buffer, 10_000)
    assert sorted(t for w in windows for t in range(w.first, w.last)) == list(range(2, 41))
    few = draw(buffer, 8)
    assert 1 <= len(few) <= 2
    firsts = {w.first for i in range(20) for w in draw(buffer, 8, seed=i)}
    assert len(firsts) >= 5  # not its end alone


def test_either_side_fills_in_for_the_other():
    assert len(draw(filled([[], [20, 20]], long_share=1.0), 30)) >= 4
    assert len(draw(filled([[20, 20], []], long_share=0.0, long_quantile=0.0), 30)) >= 4
    assert draw(DataBuffer(BufferConfig()), 30) == []


def test_a_restored_buffer_draws_what_the_saved_one_would(tmp_path):
    """C14: through the file that lies beside a checkpoint."""
    buffer = DataBuffer(BufferConfig())
    for i, n in enumerate((10, 25)):
        buffer.add(make_trace(i, n, 0, hidden=True))
    buffer.start_step(1)
    buffer.add(make_trace(7, 12, 1, version=1, hidden=True))
    saved = {"train": buffer.get_state(), "held_out": DataBuffer(BufferConfig()).get_state()}
    buffer_file.write(tmp_path / "data", saved)
    found = buffer_file.read(tmp_path / "data")
    restored = DataBuffer(BufferConfig())
    restored.set_state(*found["train"])
    assert len(restored) == 2 and restored.num_bytes == buffer.num_bytes and restored.step == 1
    for ours, theirs in zip(restored.traces, buffer.traces, strict=True):
        assert (ours.request_id, ours.step, ours.policy_version) == (
            theirs.request_id,
            theirs.step,
            theirs.policy_version,
        )
        np.testing.assert_array_equal(ours.features, theirs.features)
        np.testing.assert_array_equal(ours.hidden, theirs.hidden)
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    draws = [[(w.trace.request_id, w.first) for w in draw(b, 30)] for b in (buffer, restored)]
    assert draws[0] == draws[1]
    empty = DataBuffer(BufferConfig())
    buffer_file.write(tmp_path / "data", {"held_out": saved["held_out"]})
    empty.set_state(*buffer_file.read(tmp_path / "data")["held_out"])
    assert len(empty) == 0


def test_engines_add_while_a_trainer_draws():
    """Nothing is lost, and every draw sees whole traces."""
    buffer, stop = filled([[9, 9]]), threading.Event()
    buffer.start_step(1)
    drawn = []

    def train():
        while not stop.is_set():
            drawn.extend(w.num_rows for w in draw(buffer, 50))

    trainer = threading.Thread(target=train)
    traces = [[make_trace(100 * k + i, 6, 1) for i in range(50)] for k in range(3)]
    engines = [threading.Thread(target=lambda part: [buffer.add(t) for t in part], args=(part,)) for part in traces]
    for thread in (trainer, *engines):
        thread.start()
    for thread in engines:
        thread.join()
    stop.set()
    trainer.join()
    assert len(buffer) == 152 and buffer.num_bytes == sum(t.num_bytes for t in buffer.traces)
    assert drawn and all(1 <= n <= 8 for n in drawn)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"long_share: got 1.5"):
        BufferConfig(long_share=1.5)
