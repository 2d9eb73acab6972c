"""Weights in huge pages: on CPU, where reading all weights is most of a decoding step, page walks cost a tenth of it.

Linux gives huge pages to memory that asks for them while it is empty; XLA's allocator does not ask. `collapse` moves
what is there already.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import jax

_PAGE = 2 << 20  # of x86-64, and of aarch64 with base pages of 4 KiB
_MADV_COLLAPSE = 25  # Linux 6.1


def collapse(tree: Any) -> int:
    """Moves the CPU arrays of `tree` into huge pages, as far as the kernel can; values stay, and so do addresses.

    Every page that an array touches is tried: a neighbour in it loses nothing.

    Returns:
      Bytes in huge pages now; 0 where the system has none.
    """
    if sys.platform != "linux":
        return 0
    shards = [s.data for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device.platform == "cpu"]
    pages: set[int] = set()
    for data in shards:
        start = data.unsafe_buffer_pointer()
        pages.update(range(start // _PAGE, -(-(start + data.nbytes) // _PAGE)))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return _PAGE * sum(madvise(page * _PAGE, _PAGE, _MADV_COLLAPSE) == 0 for page in sorted(pages))
