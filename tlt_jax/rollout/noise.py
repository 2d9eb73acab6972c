"""Noise that belongs to a request and a position, and to nothing else.

The Gumbel noise of request r at position t over the vocabulary is a fixed function of (run seed, r, t): it
does not depend on the batch, the slot, the round, the strategy, the device or the jax version. That is what makes
a rollout the same token sequence under every schedule. The generator is written out here, in 32-bit adds, rotations
and xors, because `jax.random` promises neither batch invariance for every generator nor stability across versions,
and because sampling reads only `2^32 / V` of each key's period.

References:
  Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Threefry-2x32 with 13 rounds is the smallest
  that passes BigCrush there; keys are derived with the full 20.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)
_KEY_ROUNDS = 20
_BITS_ROUNDS = 13


def threefry2x32(
    k0: jax.Array, k1: jax.Array, c0: jax.Array, c1: jax.Array, num_rounds: int
) -> tuple[jax.Array, jax.Array]:
    """Two random words for each counter; all arguments u32, broadcast against each other."""
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = c0 + k0, c1 + k1
    for r in range(num_rounds):
        rotation = _ROTATIONS[r % 8]
        x0 = x0 + x1
        x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        if r % 4 == 3:
            injection = r // 4 + 1
            x0 = x0 + keys[injection % 3]
            x1 = x1 + keys[(injection + 1) % 3] + np.uint32(injection)
    return x0, x1


def request_key(seed: int, request_id: int) -> np.ndarray:
    """u32[2], the key of a request in a run; on the host.

    Args:
      seed: the run's seed, 0 <= seed < 2^64.
      request_id: 0 <= request_id < 2^64; the training loop gives every response of a run another one.
    """
    if not (0 <= seed < 2**64 and 0 <= request_id < 2**64):
        raise ValueError(f"noise: got seed {seed} and request id {request_id}, expected both in [0, 2^64)")
    halves = [np.asarray([x & 0xFFFFFFFF, x >> 32], np.uint32) for x in (seed, request_id)]
    (k0, k1), (c0, c1) = halves
    with np.errstate(over="ignore"):
        return np.stack(threefry2x32(k0, k1, c0, c1, _KEY_ROUNDS)).astype(np.uint32)


def gumbel(key_x2: jax.Array, position_x: jax.Array, vocab_size: int, stream_x: jax.Array | None = None) -> jax.Array:
    """Standard Gumbel noise f32[..., V].

    Args:
      key_x2: u32[..., 2], from `request_key`.
      position_x: i32[...], absolute position of the token to draw.
      vocab_size: V.
      stream_x: u32[...], numbers of independent streams; default 0, that of the tokens themselves.
    """
    t = position_x.astype(jnp.uint32)
    stream_x = jnp.zeros_like(t) if stream_x is None else stream_x
    k0, k1 = threefry2x32(key_x2[..., 0], key_x2[..., 1], t, stream_x, _KEY_ROUNDS)
    half = (vocab_size + 1) // 2
    index = jnp.arange(half, dtype=jnp.uint32)
    words = threefry2x32(k0[..., None], k1[..., None], index, jnp.zeros_like(index), _BITS_ROUNDS)
    # The barrier keeps XLA from generating both words again for each of their readers.
    bits = jnp.concatenate(jax.lax.optimization_barrier(words), axis=-1)[..., :vocab_size]
    # log1p keeps the small exponentials, which are the winners, at full relative precision.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
