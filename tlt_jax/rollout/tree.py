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

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass(kw_only=True)
class Tree:
    tokens: jax.Array  # i32[B,W], node 0 the root
    parent: jax.Array  # i32[B,W], 0 for the root itself
    depth: jax.Array  # i32[B,W], 0 for the root
    valid: jax.Array  # bool[B,W]; an invalid node is never accepted


@flax.struct.dataclass(kw_only=True)
class Verdict:
    """What one verification commits: the drawn tokens along the accepted path."""

    path: jax.Array  # i32[B,D+1] nodes of the path, root first; 0 past its end
    num_committed: jax.Array  # i32[B] accepted nodes and the bonus token, 1..D+1
    tokens: jax.Array  # i32[B,D+1] drawn at the path's nodes; only the first num_committed count
    logprobs: jax.Array  # f32[B,D+1]


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


def ancestor_mask(parent_BW: jax.Array, max_depth: int) -> jax.Array:
    """bool[B,W,W]: node (row) sees itself and its ancestors (columns)."""
    W = parent_BW.shape[1]
    self_WW = jnp.eye(W, dtype=bool)
    mask_BWW = jnp.broadcast_to(self_WW, (*parent_BW.shape, W))
    for _ in range(max_depth):
        mask_BWW = self_WW | jnp.take_along_axis(mask_BWW, parent_BW[:, :, None], axis=1)
    return mask_BWW


def accept(tree: Tree, drawn_BW: jax.Array, logprob_BW: jax.Array, max_depth: int) -> Verdict:
    """Follows the drawn tokens from the root for as long as a child holds them.

    Args:
      tree: the proposal.
      drawn_BW: the target's own token at every node, drawn with the noise of the position after the node.
      logprob_BW: its log-probability.
      max_depth: static, D: the tree's depth at most.
    """
    accepted_BW = tree.valid & (tree.tokens == jnp.take_along_axis(drawn_BW, tree.parent, axis=1))
    accepted_BW = accepted_BW.at[:, 0].set(True)
    for _ in range(max_depth):
        accepted_BW = accepted_BW & jnp.take_along_axis(accepted_BW, tree.parent, axis=1)
    on_path_BDW = accepted_BW[:, None] & (tree.depth[:, None] == jnp.arange(max_depth + 1)[:, None])
    path_BD = jnp.argmax(on_path_BDW, axis=2).astype(jnp.int32)
    return Verdict(
        path=path_BD,
        num_committed=jnp.sum(accepted_BW, axis=1, dtype=jnp.int32),
        tokens=jnp.take_along_axis(drawn_BW, path_BD, axis=1),
        logprobs=jnp.take_along_axis(logprob_BW, path_BD, axis=1),
    )


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


@flax.struct.dataclass(kw_only=True)
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
