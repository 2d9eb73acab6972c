import sys

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.huge_pages import collapse


def test_values_and_addresses_stay():
    tree = {"a": jnp.arange(3 << 20, dtype=jnp.float32), "b": (jnp.ones(5), jnp.zeros((0, 4)))}
    expected = jax.tree.map(np.array, tree)
    addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
    num_bytes = collapse(tree)
    # 12 MiB touch seven pages at most, five floats two.
    assert num_bytes % (2 << 20) == 0 and 0 <= num_bytes <= 9 * (2 << 20)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)] == addresses
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def test_other_systems_have_none(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert collapse({"a": jnp.ones(1 << 20)}) == 0
