"""Speculative rounds, each as two programs: draft a tree, verify and commit it.

A round of a row whose cache holds `length` = L tokens, newest token at position L:
  1. Ingest. The drafter takes the true features of the positions committed since its last row, at most D+1 of them; its
     output at the last one predicts position L+1.
  2. Draft. A tree of W nodes grows from there, level by level, under the noise that the target will be sampled with.
  3. Verify. One target forward over the W nodes; at each node the target's own token is drawn.
  4. Commit. The drawn tokens along the path whose nodes hold them; the first that no node holds is the last. The
     path's cache entries and features move to the front of the block.

`draft` is 1 and 2, `verify` 3 and 4. Verification asks of a tree its width alone, so one program serves every strategy
of that width, whoever drafts. The state goes from program to program on the device; the host reads the outputs of
several rounds at once. A round that begins with no more than `exit_live` rows alive does nothing.

Invariants:
  - What is committed is what plain decoding draws: the noise belongs to the request and the position (`noise.py`).
  - Slots from L on are scratch: of the target's cache, of the drafter's, of the features. The caller keeps
    `length + scratch <= S` for live rows.
  - The drafter's rows below `length - num_pending` hold true features, none of its own guesses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from tlt_jax.models.cache import LayerCache, compact, with_row_axis, without_row_axis
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.layers import MASKED
from tlt_jax.models.transformer import compute_logits, forward_cached
from tlt_jax.rollout import rejection, tree as trees
from tlt_jax.rollout.config import COUPLED, REJECTION, TARGET_ONLY
from tlt_jax.rollout.memory import Memory, features_of, read_features, write_features
from tlt_jax.rollout.sampling import SamplingArrays, draw_with, position_noise, warp
from tlt_jax.rollout.steps import Rows
from tlt_jax.strategy import Strategy
from tlt_jax.types import DraftModel, Params


@dataclasses.dataclass(frozen=True)
class Shape:
    """A draft tree's shape: `depth` D levels, `topk` children and beams, W = `width` nodes verified, root included.

    `rule` says with which noise it grows: that of the tokens to come ("coupled"), none ("target_only": the drafter's
    most likely nodes), or noise of its own, so that drafts are drawn from the drafter's law ("rejection").
    """

    depth: int
    topk: int
    width: int
    rule: str = COUPLED

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def scratch(self) -> int:
        """Slots that a round uses from a row's length on: the block to verify, or the drafter's own rows."""
        return max(self.width, (self.depth - 1) * self.topk)


def shape_of(strategy: Strategy, rule: str = COUPLED) -> Shape:
    """The shape of a chain, tree or n-gram strategy. W nodes are at most W - 1 deep, so deeper levels are left out."""
    width = strategy.verify_width
    return Shape(min(strategy.depth, width - 1), strategy.topk, width, rule)


@struct.dataclass(kw_only=True)
class Pending:
    """Committed tokens whose features the drafter has not taken in: rows `length-num ... length-1`."""

    tokens: jax.Array  # i32[B,W]: token t+1 of row t
    num: jax.Array  # i32[B], at most D+1


@struct.dataclass(kw_only=True)
class SpecOut:
    tokens: jax.Array  # i32[B,W] committed, -1 past the end
    logprobs: jax.Array  # f32[B,W]
    drafted: jax.Array  # i32[B] nodes that the drafter proposed


def ingest(
    params: Params,
    draft_params: Params,
    drafter: DraftModel,
    cache: LayerCache,
    features_BSD: jax.Array,
    tokens_BT: jax.Array,
    start_B: jax.Array,
) -> LayerCache:
    """Takes T rows of true features into the drafter's cache: row t gets `features[t]` and `tokens_BT[t - start]`."""
    features_BTD = read_features(_drafter_features(params, drafter, features_BSD), start_B, tokens_BT.shape[1])
    _, cache = drafter.forward(draft_params, params, features_BTD, tokens_BT, start_B, cache, None, None)
    return cache


def draft(
    params: Params,
    draft_params: Params,
    drafter: DraftModel,
    shape: Shape,
    cache: LayerCache,
    features_BSD: jax.Array,
    rows: Rows,
    pending: Pending,
    exit_live: jax.Array,
) -> tuple[LayerCache, trees.Tree]:
    """Ingests what is pending and grows a tree for each row.

    Args:
      params: target parameters.
      draft_params: the drafter's.
      drafter: static.
      shape: static.
      cache: donated; the drafter's.
      features_BSD: of the committed positions.
      rows: state of the rows.
      pending: of each row.
      exit_live: i32[].
    """
    features_BSD = _drafter_features(params, drafter, features_BSD)

    def grow_once(carry):
        _, cache, _ = carry
        return jnp.bool_(True), *_grow(params, draft_params, drafter, shape, cache, features_BSD, rows, pending)

    B, W = rows.token.shape[0], shape.width
    zero_BW = jnp.zeros((B, W), jnp.int32)
    V = params["embed"]["weight"].shape[0]
    log_q = jnp.zeros((B, W - 1, V), jnp.float32) if shape.rule == REJECTION else None
    nothing = trees.Tree(tokens=zero_BW, parent=zero_BW, depth=zero_BW, valid=zero_BW == 1, log_q=log_q)
    is_over = ~_goes_on(rows, exit_live)
    _, cache, tree = jax.lax.while_loop(lambda carry: ~carry[0], grow_once, (is_over, cache, nothing))
    return cache, tree


def verify(
    params: Params,
    model: ModelConfig,
    feature_layers: Sequence[int],
    truncate: bool,
    rule: str,
    memory: Memory,
    rows: Rows,
    tree: trees.Tree,
    exit_live: jax.Array,
) -> tuple[Memory, Rows, Pending, SpecOut]:
    """One target forward over each row's tree, and what it commits.

    Args:
      params: target parameters.
      model: static.
      feature_layers: static.
      truncate: static; whether any row uses top-k, top-p or min-p.
      rule: static; "rejection", or any other: those differ in how the tree was grown alone.
      memory: donated; without the drafter's cache.
      rows: state of the rows.
      tree: proposals, W nodes.
      exit_live: i32[].
    """

    def verify_once(carry):
        _, memory, rows, _, _ = carry
        memory, verdict = _verify(params, model, feature_layers, truncate, rule, memory, rows, tree)
        num_B, rows, pending = _commit(rows, verdict)
        kept_BW = jnp.arange(W)[None] < num_B[:, None]
        out = SpecOut(
            tokens=jnp.where(kept_BW, verdict.tokens, -1),
            logprobs=jnp.where(kept_BW, verdict.logprobs, 0.0),
            drafted=jnp.where(num_B > 0, jnp.sum(tree.valid, axis=1, dtype=jnp.int32) - 1, 0),
        )
        return jnp.bool_(True), memory, rows, pending, out

    B, W = tree.tokens.shape
    if B == 1:
        memory = dataclasses.replace(memory, target=without_row_axis(memory.target))
    zero_B, zero_BW = jnp.zeros(B, jnp.int32), jnp.zeros((B, W), jnp.int32)
    nothing = SpecOut(tokens=zero_BW - 1, logprobs=jnp.zeros((B, W), jnp.float32), drafted=zero_B)
    carry = (~_goes_on(rows, exit_live), memory, rows, Pending(tokens=zero_BW, num=zero_B), nothing)
    _, memory, rows, pending, out = jax.lax.while_loop(lambda carry: ~carry[0], verify_once, carry)
    if B == 1:
        memory = dataclasses.replace(memory, target=with_row_axis(memory.target))
    return memory, rows, pending, out


def _goes_on(rows: Rows, exit_live: jax.Array) -> jax.Array:
    return jnp.sum(rows.live, dtype=jnp.int32) > exit_live


def _drafter_features(params: Params, drafter: DraftModel, features_BSD: jax.Array) -> jax.Array:
    """The part of the feature buffer that the drafter reads."""
    D = params["embed"]["weight"].shape[1]
    return features_BSD[..., : D * max(len(drafter.feature_layers), 1)]


def _block_start(rows: Rows, capacity: int, scratch: int) -> jax.Array:
    """Where a row's scratch block begins; that of a row that was never alive is kept inside its cache."""
    return jnp.minimum(rows.length, capacity - scratch)


def _grow(params, draft_params, drafter: DraftModel, shape: Shape, cache, features_BSD, rows: Rows, pending: Pending):
    S = features_BSD.shape[1]
    length_B = _block_start(rows, S, shape.scratch)
    start_B = jnp.clip(length_B - pending.num, 0, S - shape.depth - 1)
    features_BTD = read_features(features_BSD, start_B, shape.depth + 1)
    tokens_BT = pending.tokens[:, : shape.depth + 1]
    h_BTD, cache = drafter.forward(draft_params, params, features_BTD, tokens_BT, start_B, cache, None, None)
    last_B11 = jnp.maximum(pending.num - 1, 0)[:, None, None]
    root_B1D = jnp.take_along_axis(h_BTD, last_B11, axis=1)
    position_BD = length_B[:, None] + 1 + jnp.arange(shape.depth, dtype=jnp.int32)
    V = params["embed"]["weight"].shape[0]
    noise_BDV = None
    if shape.rule != TARGET_ONLY:
        stream_BD = rejection.stream(rejection.DRAFT, position_BD, length_B) if shape.rule == REJECTION else None
        noise_BDV = jax.lax.optimization_barrier(position_noise(rows.sampling, position_BD, V, stream_BD))
    grow = _grow_chain if shape.is_chain else _grow_tree
    context = _Context(params, draft_params, drafter, shape, rows.sampling, noise_BDV, length_B)
    tree, cache = grow(context, rows.token, root_B1D, cache)
    # Without any feature to start from (a prompt of one token) nothing can be proposed.
    return cache, dataclasses.replace(tree, valid=tree.valid & ((pending.num > 0)[:, None] | (tree.depth == 0)))


@dataclasses.dataclass(frozen=True)
class _Context:
    params: Params
    draft_params: Params
    drafter: DraftModel
    shape: Shape
    sampling: SamplingArrays
    noise_BDV: jax.Array | None
    length_B: jax.Array

    def scores(self, h_BTD: jax.Array, level: int) -> jax.Array:
        """Log of each draft token's chance to win the draw after nodes of `level`, as the drafter sees it."""
        scaled_BTV = self.scaled_logits(h_BTD)
        if self.noise_BDV is None:
            return jax.nn.log_softmax(scaled_BTV, axis=-1)
        noise_BV = self.noise_BDV[:, level]
        if self.drafter.vocab_size != noise_BV.shape[-1]:
            noise_BV = jnp.take(noise_BV, self.drafter.target_ids(jnp.arange(self.drafter.vocab_size)), axis=1)
        hot_B11 = self.sampling.temperature[:, None, None] > 0
        return jax.nn.log_softmax(scaled_BTV + jnp.where(hot_B11, noise_BV[:, None], 0.0), axis=-1)

    def scaled_logits(self, h_BTD: jax.Array) -> jax.Array:
        """The drafter's logits at the row's temperature; at temperature 0, at 1."""
        temperature_B11 = self.sampling.temperature[:, None, None]
        logits_BTV = self.drafter.logits(self.draft_params, self.params, h_BTD)
        return logits_BTV / jnp.where(temperature_B11 > 0, temperature_B11, 1.0)

    def law(self, h_BTD: jax.Array) -> jax.Array:
        """Log-probabilities over the target's vocabulary that a draft of the rule "rejection" is drawn from."""
        log_q_BTV = jax.nn.log_softmax(self.scaled_logits(h_BTD), axis=-1)
        V = self.params["embed"]["weight"].shape[0]
        if self.drafter.vocab_size == V:
            return log_q_BTV
        ids = self.drafter.target_ids(jnp.arange(self.drafter.vocab_size))
        return jnp.full((*h_BTD.shape[:2], V), MASKED).at[..., ids].set(log_q_BTV)

    def step(self, h_BTD, tokens_BT, level: int, num_before: int, cache, block_mask):
        """Drafter rows for nodes of `level` (1, 2, ...), after `num_before` rows of earlier levels."""
        start_B = self.length_B + num_before
        position_BT = jnp.broadcast_to((self.length_B + level - 1)[:, None], tokens_BT.shape)
        return self.drafter.forward(
            self.draft_params, self.params, h_BTD, tokens_BT, start_B, cache, position_BT, block_mask
        )


def _grow_chain(context: _Context, root_B, h_B1D, cache):
    """One child a node: the drafter's own winner of the draw."""
    drafts, laws = [], []
    D = context.shape.depth
    for level in range(D):
        if context.shape.rule == REJECTION:
            laws.append(context.law(h_B1D))
        _, index_B1 = trees.top_k(context.scores(h_B1D, level)[:, 0], 1)
        drafts.append(context.drafter.target_ids(index_B1))
        if level + 1 < D:
            h_B1D, cache = context.step(h_B1D, drafts[-1], level + 1, level, cache, None)
    drafts_BD = jnp.concatenate(drafts, axis=1)
    tree = trees.chain(root_B, drafts_BD, jnp.full(root_B.shape, D, jnp.int32))
    return dataclasses.replace(tree, log_q=jnp.concatenate(laws, axis=1) if laws else None), cache


def _grow_tree(context: _Context, root_B, h_B1D, cache):
    """`topk` beams a level by cumulative score; then the best W-1 of all candidates."""
    D, k = context.shape.depth, context.shape.topk
    B = root_B.shape[0]
    score_Bk, index_Bk = trees.top_k(context.scores(h_B1D, 0)[:, 0], k)
    tokens_Bk = context.drafter.target_ids(index_Bk)
    levels = [(tokens_Bk, jnp.full((B, k), -1, jnp.int32), score_Bk)]
    beam_Bk = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))  # candidate index of each beam
    h_BkD = jnp.broadcast_to(h_B1D, (B, k, h_B1D.shape[-1]))
    mask_BkM = jnp.broadcast_to(jnp.eye(k, dtype=bool), (B, k, k))
    offset = k
    for level in range(1, D):
        h_BkD, cache = context.step(h_BkD, tokens_Bk, level, (level - 1) * k, cache, mask_BkM)
        child_score, child_index = trees.top_k(context.scores(h_BkD, level), k)
        total_BM = (score_Bk[:, :, None] + child_score).reshape(B, k * k)
        tokens_BM = context.drafter.target_ids(child_index).reshape(B, k * k)
        levels.append((tokens_BM, jnp.repeat(beam_Bk, k, axis=1), total_BM))
        score_Bk, pick_Bk = jax.lax.top_k(total_BM, k)
        parent_Bk = pick_Bk // k  # among the beams just expanded
        tokens_Bk = jnp.take_along_axis(tokens_BM, pick_Bk, axis=1)
        beam_Bk = offset + pick_Bk
        offset += k * k
        h_BkD = jnp.take_along_axis(h_BkD, parent_Bk[:, :, None], axis=1)
        seen_BkM = jnp.take_along_axis(mask_BkM, parent_Bk[:, :, None], axis=1)
        mask_BkM = jnp.concatenate([seen_BkM, jnp.broadcast_to(jnp.eye(k, dtype=bool), (B, k, k))], axis=2)
    tokens, parents, scores = (jnp.concatenate(x, axis=1) for x in zip(*levels, strict=True))
    depth = jnp.concatenate([jnp.full(t.shape[1], d + 1, jnp.int32) for d, (t, _, _) in enumerate(levels)])
    candidates = trees.Candidates(tokens=tokens, parent=parents, depth=depth, score=scores)
    return trees.select(candidates, root_B, context.shape.width), cache


def _verify(
    params, model: ModelConfig, feature_layers, truncate: bool, rule: str, memory: Memory, rows: Rows, tree: trees.Tree
):
    """The target's token at every node, and the path that they accept; the path moved to the front."""
    W = tree.tokens.shape[1]
    start_B = _block_start(rows, memory.target[0].k.shape[-1], W)
    position_BW = start_B[:, None] + tree.depth
    forward, cache = forward_cached(
        params,
        model,
        tree.tokens,
        start_B,
        memory.target,
        positions_BT=position_BW,
        block_mask=trees.ancestor_mask(tree.parent),
        feature_layers=feature_layers,
    )
    law_BWV = warp(compute_logits(params, model, forward.hidden), rows.sampling, truncate)
    if rule == REJECTION:
        verdict = rejection.accept(tree, law_BWV, rows.sampling, position_BW + 1, start_B)
    else:
        noise_BWV = position_noise(rows.sampling, position_BW + 1, law_BWV.shape[-1])
        token_BW, logprob_BW = draw_with(law_BWV, rows.sampling, noise_BWV)
        verdict = trees.accept(tree, token_BW, logprob_BW)
    cache = compact(cache, start_B, verdict.path, W)
    features_BWD = jnp.take_along_axis(features_of(forward), verdict.path[:, :, None], axis=1)
    features = write_features(memory, features_BWD, start_B)
    return dataclasses.replace(memory, target=cache, features=features), verdict


def _commit(rows: Rows, verdict: trees.Verdict) -> tuple[jax.Array, Rows, Pending]:
    """Cuts at the first stop id or the cap; returns tokens committed per row, and the state after them."""
    W = verdict.tokens.shape[1]
    index_W = jnp.arange(W, dtype=jnp.int32)
    is_stop_BW = jnp.any(verdict.tokens[:, :, None] == rows.stop_ids[:, None], axis=2)
    first_stop_B = jnp.min(jnp.where(is_stop_BW, index_W, W), axis=1)
    room_B = rows.limit - rows.length - 1
    num_B = jnp.minimum(jnp.minimum(verdict.num_committed, first_stop_B + 1), room_B)
    stopped_B = (first_stop_B < num_B) | (num_B >= room_B)
    num_B = jnp.where(rows.live, num_B, 0)
    last_B1 = jnp.maximum(num_B - 1, 0)[:, None]
    newest_B = jnp.take_along_axis(verdict.tokens, last_B1, axis=1)[:, 0]
    rows = dataclasses.replace(
        rows, token=jnp.where(rows.live, newest_B, rows.token), length=rows.length + num_B, live=rows.live & ~stopped_B
    )
    return num_B, rows, Pending(tokens=verdict.tokens, num=num_B)
