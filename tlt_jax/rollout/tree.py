"""Draft trees: which node follows which, which nodes see which, and growing a tree level by level.

A tree has W nodes per row. Node 0 is the root, the newest committed token; every other node proposes the token that
follows its parent. Parents come before their children, siblings hold distinct tokens. A chain is a tree with one child
per node.

References:
  Li et al., EAGLE-2, arXiv 2406.16858: beams by cumulative score, then the best W - 1 of all candidates.
  Departure: under shared noise a child's score is its share of `softmax(log q + Gumbel)` among the vocabulary, not
  `q` itself. The noise is known when drafting, and the share says how clearly this child wins the draw.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass(kw_only=True)
class Tree:
    tokens: jax.Array  # i32[B,W], node 0 the root
    parent: jax.Array  # i32[B,W], 0 for the root itself
    depth: jax.Array  # i32[B,W], 0 for the root
    valid: jax.Array  # bool[B,W]; an invalid node is never accepted
    log_q: jax.Array | None = None  # f32[B,W-1,V] law that node i+1 was drawn from, where the rule needs it


@struct.dataclass(kw_only=True)
class Verdict:
    """What one verification commits: the drawn tokens along the accepted path."""

    path: jax.Array  # i32[B,W] nodes of the path, root first; 0 past its end
    num_committed: jax.Array  # i32[B] accepted nodes and the bonus token, 1..W
    tokens: jax.Array  # i32[B,W] drawn at the path's nodes; only the first num_committed count
    logprobs: jax.Array  # f32[B,W]


def chain(root_B: jax.Array, drafts_BD: jax.Array, num_drafts_B: jax.Array) -> Tree:
    """The tree of one sequence of drafts per row, of which the first `num_drafts_B` are valid."""
    B, D = drafts_BD.shape
    index_W = jnp.arange(D + 1, dtype=jnp.int32)
    return Tree(
        tokens=jnp.concatenate([root_B[:, None], drafts_BD], axis=1),
        parent=jnp.broadcast_to(jnp.maximum(index_W - 1, 0), (B, D + 1)),
        depth=jnp.broadcast_to(index_W, (B, D + 1)),
        valid=index_W[None] <= num_drafts_B[:, None],
    )


def host_chain(tokens_BW: np.ndarray, num_drafts_B: np.ndarray) -> Tree:
    """As `chain`, of host arrays: `tokens_BW` holds the root, then the drafts."""
    B, W = tokens_BW.shape
    index_W = np.arange(W, dtype=np.int32)
    return Tree(  # host arrays where programs take any
        tokens=tokens_BW,  # pyright: ignore[reportArgumentType]
        parent=np.ascontiguousarray(np.broadcast_to(np.maximum(index_W - 1, 0), (B, W))),  # pyright: ignore
        depth=np.ascontiguousarray(np.broadcast_to(index_W, (B, W))),  # pyright: ignore
        valid=index_W[None] <= num_drafts_B[:, None],  # pyright: ignore
    )


def ancestor_mask(parent_BW: jax.Array) -> jax.Array:
    """bool[B,W,W]: node (row) sees itself and its ancestors (columns)."""
    W = parent_BW.shape[1]
    mask_BWW = jnp.broadcast_to(jnp.eye(W, dtype=bool), (*parent_BW.shape, W))
    for ancestor_BW in _ancestors(parent_BW):
        mask_BWW = mask_BWW | jnp.take_along_axis(mask_BWW, ancestor_BW[:, :, None], axis=1)
    return mask_BWW


def accept(tree: Tree, drawn_BW: jax.Array, logprob_BW: jax.Array) -> Verdict:
    """Follows the drawn tokens from the root for as long as a child holds them.

    Args:
      tree: the proposal.
      drawn_BW: the target's own token at every node, drawn with the noise of the position after the node.
      logprob_BW: its log-probability.
    """
    accepted_BW = tree.valid & (tree.tokens == jnp.take_along_axis(drawn_BW, tree.parent, axis=1))
    accepted_BW = accepted_BW.at[:, 0].set(True)
    for ancestor_BW in _ancestors(tree.parent):
        accepted_BW = accepted_BW & jnp.take_along_axis(accepted_BW, ancestor_BW, axis=1)
    W = tree.tokens.shape[1]
    on_path_BWW = accepted_BW[:, None] & (tree.depth[:, None] == jnp.arange(W)[:, None])
    path_BW = jnp.argmax(on_path_BWW, axis=2).astype(jnp.int32)
    return Verdict(
        path=path_BW,
        num_committed=jnp.sum(accepted_BW, axis=1, dtype=jnp.int32),
        tokens=jnp.take_along_axis(drawn_BW, path_BW, axis=1),
        logprobs=jnp.take_along_axis(logprob_BW, path_BW, axis=1),
    )


def _ancestors(parent_BW: jax.Array) -> Iterator[jax.Array]:
    """Each node's ancestor 1, 2, 4, ... steps up, the root's being the root: enough to reach any node's root."""
    distance = 1
    while distance < parent_BW.shape[1]:
        yield parent_BW
        parent_BW = jnp.take_along_axis(parent_BW, parent_BW, axis=1)
        distance *= 2


def top_k(x_xV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Values and indices of the k largest of the last axis, largest first; k small.

    Repeated maximum: `lax.top_k` sorts whole rows on some backends.
    """
    index_V = jnp.arange(x_xV.shape[-1], dtype=jnp.int32)
    values, indices = [], []
    for _ in range(k):
        top_x = jnp.max(x_xV, axis=-1, keepdims=True)
        first_x = jnp.min(jnp.where(x_xV == top_x, index_V, x_xV.shape[-1] - 1), axis=-1, keepdims=True)
        values.append(top_x)
        indices.append(first_x)
        x_xV = jnp.where(index_V == first_x, -jnp.inf, x_xV)
    return jnp.concatenate(values, axis=-1), jnp.concatenate(indices, axis=-1)


@struct.dataclass(kw_only=True)
class Candidates:
    """All nodes grown so far, level after level, without the root. M of them."""

    tokens: jax.Array  # i32[B,M]
    parent: jax.Array  # i32[B,M] index among the candidates, -1 for children of the root
    depth: jax.Array  # i32[M]
    score: jax.Array  # f32[B,M] cumulative, never above the parent's


def select(candidates: Candidates, root_B: jax.Array, num_nodes: int) -> Tree:
    """The tree of the root and the best `num_nodes - 1` candidates; with each comes its parent."""
    score_BW, index_BW = jax.lax.top_k(candidates.score, num_nodes - 1)
    parent_BW = jnp.take_along_axis(candidates.parent, index_BW, axis=1)
    # A parent scores at least as high as its child and lies before it, so it is among those kept.
    place_BWW = parent_BW[:, :, None] == index_BW[:, None, :]
    parent_BW = jnp.where(parent_BW < 0, 0, 1 + jnp.argmax(place_BWW, axis=2)).astype(jnp.int32)
    zero_B1 = jnp.zeros((root_B.shape[0], 1), jnp.int32)
    tokens_BW = jnp.take_along_axis(candidates.tokens, index_BW, axis=1)
    depth_BW = candidates.depth[index_BW]
    return Tree(
        tokens=jnp.concatenate([root_B[:, None], tokens_BW], axis=1),
        parent=jnp.concatenate([zero_B1, parent_BW], axis=1),
        depth=jnp.concatenate([zero_B1, depth_BW], axis=1),
        valid=jnp.concatenate([zero_B1 == 0, score_BW > -jnp.inf], axis=1),
    )
