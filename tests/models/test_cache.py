import jax
import jax.numpy as jnp
import numpy as np

from tests.rollout.tiny import MODEL
from tlt_jax.models.cache import LayerCache, cache_bytes, cache_shapes, init_cache, put_row, resize, write


def _numbered(num_rows, capacity):
    """A cache whose entries say row and slot: 100 * row + slot."""
    value = 100.0 * np.arange(num_rows)[:, None] + np.arange(capacity)
    k = np.broadcast_to(value[:, None, None, :], (num_rows, 2, 8, capacity))
    v = np.broadcast_to(value[:, None, :, None], (num_rows, 2, capacity, 8))
    return tuple(LayerCache(k=jnp.asarray(k), v=jnp.asarray(v)) for _ in range(2))


def _slots(cache):
    """[rows, slots] of a numbered cache, the same in keys and values of every layer."""
    for layer in cache:
        np.testing.assert_array_equal(layer.k[:, 0, 0], layer.v[:, 1, :, 3])
        assert np.ptp(layer.k, axis=(1, 2)).max() == 0 and np.ptp(layer.v, axis=(1, 3)).max() == 0
        np.testing.assert_array_equal(layer.k, cache[0].k)
    return np.asarray(cache[0].k[:, 0, 0])


def test_shapes_and_bytes():
    shapes = cache_shapes(MODEL, 3, 64, "bfloat16")
    assert len(shapes) == MODEL.num_layers
    assert (shapes[0].k.shape, shapes[0].v.shape) == ((3, 2, 8, 64), (3, 2, 64, 8))
    assert cache_bytes(MODEL, 3, 64, "bfloat16") == sum(2 * x.size for x in jax.tree.leaves(shapes)) == 24576
    assert cache_bytes(MODEL, 3, 64, "float32") == 49152
    cache = init_cache(MODEL, 3, 64, "float32")
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == 49152 and not any(x.any() for x in jax.tree.leaves(cache))


def test_write_puts_each_row_at_its_own_slots():
    layer = _numbered(3, 8)[0]
    new = jnp.asarray(np.arange(3)[:, None] * 1000 + np.asarray([500, 501]), jnp.float32)
    new = jnp.broadcast_to(new[:, :, None, None], (3, 2, 2, 8))
    written = _slots((write(layer, new, new, jnp.asarray([0, 3, 6])),))
    expected = _slots(_numbered(3, 8)).copy()
    expected[0, 0:2], expected[1, 3:5], expected[2, 6:8] = [500, 501], [1500, 1501], [2500, 2501]
    np.testing.assert_array_equal(written, expected)


def test_a_write_past_the_end_would_shift():
    """A19: why `start + T <= S` is the caller's duty; four entries at slot 6 of 8 would land on 4..7."""
    layer = _numbered(1, 8)[0]
    new = jnp.full((1, 4, 2, 8), 77.0)
    written = _slots((write(layer, new, new, jnp.asarray([6])),))
    assert written.tolist() == [[0, 1, 2, 3, 77, 77, 77, 77]]


def test_write_casts_to_the_dtype_of_the_cache():
    layer = init_cache(MODEL, 1, 8, "bfloat16")[0]
    written = write(layer, jnp.full((1, 1, 2, 8), 1.001), jnp.full((1, 1, 2, 8), 3.0), jnp.asarray([2]))
    assert written.k.dtype == written.v.dtype == jnp.bfloat16
    assert float(written.k[0, 0, 0, 2]) == 1.0 and float(written.v[0, 1, 2, 0]) == 3.0


def test_resize_moves_rows_and_changes_slots():
    cache = _numbered(4, 6)
    cut = _slots(resize(cache, jnp.asarray([3, 1]), 4))
    assert cut.tolist() == [[300, 301, 302, 303], [100, 101, 102, 103]]
    grown = _slots(resize(cache, jnp.asarray([2, 0, 0]), 8))
    assert grown.tolist() == [[200, 201, 202, 203, 204, 205, 0, 0]] + [[0, 1, 2, 3, 4, 5, 0, 0]] * 2


def test_put_row_overwrites_the_head_of_one_row():
    cache, source = _numbered(3, 6), jax.tree.map(lambda x: x + 5000, _numbered(1, 4))
    filled = _slots(put_row(cache, source, jnp.int32(1)))
    assert filled.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [5000, 5001, 5002, 5003, 104, 105],
        [200, 201, 202, 203, 204, 205],
    ]
