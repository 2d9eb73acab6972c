"""The drafter's optimizer step, jitted, with donated state and fixed shapes.

What a caller does, who decides when and on what thread:

    trainer = make_draft_trainer(config, loss, optim, batch=..., d2t=...)
    state = trainer.init(draft_params)                  # or a restore into `trainer.shapes`
    batch = trainer.make_batch(buffer, rng)             # host only; None while the buffer has nothing to train on
    state, metrics = trainer.step(state, target_params, batch)

One step is the unit that a preemption may cost: it is never cut. `state.params` is what `decode.prepare` takes, valid
until the next step, which donates it: publish a copy. `state.tokens` counts what a merge of several trainers weighs by.

Life of `step(state, target_params, batch)`:
1. Supervised rows are counted over all micro-batches: the denominator of everything below.
2. Micro-batches are worked off one after the other; their gradients add up to that of their union.
3. Clip, AdamW. A gradient that is not finite changes nothing but is reported.

Only `state` changes. It holds the trainable parameters alone, so a checkpoint of it never contains a frozen tensor.
The noise of step n depends on the seed and n, not on the process or on what ran before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tlt_jax.drafter.buffer import DataBuffer
from tlt_jax.drafter.config import DraftConfig, LossConfig
from tlt_jax.drafter.loss import DraftBatch, count_rows, draft_loss
from tlt_jax.drafter.model import check_map, draft_param_shapes, frozen_params
from tlt_jax.drafter.packing import BatchConfig, make_batches
from tlt_jax.sharding import param_shardings, replicated
from tlt_jax.types import Params

PARAM_TABLE: tuple[tuple[str, P], ...] = (
    (r"^(fc|head)/weight$", P("tensor", "fsdp")),
    (r"^fc/bias$", P("tensor")),
    (r"^layer/attn/(q|k|v)/weight$", P("tensor", "fsdp")),
    (r"^layer/attn/(q|k|v)/bias$", P("tensor")),
    (r"^layer/attn/o/weight$", P("fsdp", "tensor")),
    (r"^layer/attn/o/bias$", P()),
    (r"^layer/mlp/(gate|up)/weight$", P("tensor", "fsdp")),
    (r"^layer/mlp/down/weight$", P("fsdp", "tensor")),
    (r"^(layer/(embed|hidden|mlp)_norm|final_norm)/scale$", P()),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptimConfig:
    """AdamW for the drafter.

    Attributes:
      learning_rate: peak. Adapting a drafter inside a run wants a lower one than its first training.
      warmup_steps: optimizer steps of linear growth; the first one has a rate above 0.
      total_steps: steps of a cosine decay to a tenth of the peak, warm-up included; 0 stays at the peak.
      b1, b2, eps: of Adam.
      weight_decay: decoupled, on matrices only.
      max_grad_norm: the gradient is scaled down to this global norm; 0 is off.
      feature_noise: width of the uniform noise on features that go in, times 512 / D: 0.2 in first training, so that
        the drafter bears its own errors; 0 is off.
    """

    learning_rate: float = 5e-5
    warmup_steps: int = 0
    total_steps: int = 0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.5
    feature_noise: float = 0.0

    def __post_init__(self):
        checks = (
            ("learning_rate", self.learning_rate >= 0.0, ">= 0"),
            ("warmup_steps", self.warmup_steps >= 0, ">= 0 optimizer steps"),
            ("total_steps", self.total_steps == 0 or self.total_steps > self.warmup_steps, "0 or above warmup_steps"),
            ("b1", 0.0 <= self.b1 < 1.0, "in [0, 1)"),
            ("b2", 0.0 <= self.b2 < 1.0, "in [0, 1)"),
            ("eps", self.eps > 0.0, "> 0"),
            ("weight_decay", self.weight_decay >= 0.0, ">= 0"),
            ("max_grad_norm", self.max_grad_norm >= 0.0, ">= 0 (0 is off)"),
            ("feature_noise", self.feature_noise >= 0.0, ">= 0"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"drafter.optim.{name}: got {getattr(self, name)!r}, expected {expected}")


@flax.struct.dataclass(kw_only=True)
class DraftState:
    """All that training changes and a checkpoint needs."""

    params: Params  # f32 master weights, trainable only
    opt_state: Any
    step: jax.Array  # i32[] optimizer steps applied
    tokens: jax.Array  # i32[] supervised rows that those steps were taken on


class DraftTrainer(NamedTuple):
    """Functions around a `DraftState`.

    Attributes:
      init: draft_params -> state; copies, in f32, so that the caller's parameters survive donation.
      step: (state, target_params, batch) -> (state, metrics); donates the state. `batch` is a `DraftBatch` of [A,B,T]
        arrays. Metrics: f32[] `loss`, `grad_norm`, `is_applied`, and f32[U] by unroll step: `rows` and means over them
        of `feature_loss`, `logit_loss`, `top1`, `top3`, `overlap`, `accept`.
      evaluate: (draft_params, target_params, batch) -> metrics of drafting `eval_steps` tokens: as above, under the
        target's whole law, and f32[] `committed` and `rounds`, whose ratio is the accept length of chains of that many
        drafts.
      make_batch: (buffer, rng) -> a batch of host arrays, or None where the buffer has no row to supervise.
      shapes: the state as `ShapeDtypeStruct`s, with shardings where there is a mesh.
    """

    init: Callable[[Params], DraftState]
    step: Callable[[DraftState, Params, DraftBatch], tuple[DraftState, dict[str, jax.Array]]]
    evaluate: Callable[[Params, Params, DraftBatch], dict[str, jax.Array]]
    make_batch: Callable[[DataBuffer, np.random.Generator], DraftBatch | None]
    shapes: DraftState


def make_draft_trainer(
    config: DraftConfig,
    loss: LossConfig,
    optim: DraftOptimConfig,
    *,
    batch: BatchConfig | None = None,
    d2t: np.ndarray | None = None,
    seed: int = 0,
    eval_steps: int = 5,
    mesh: Mesh | None = None,
) -> DraftTrainer:
    """Builds the trainer; nothing is compiled before first use.

    Args:
      config: the drafter.
      loss: what it is trained for.
      optim: how.
      batch: the shape of what `make_batch` makes; None takes the default.
      d2t: map of a reduced draft vocabulary.
      seed: of the feature noise.
      eval_steps: drafts in a chain that `evaluate` looks at.
      mesh: devices of this worker, axes `data`, `fsdp`, `tensor`; None is one device. B is split over the first two.

    Raises:
      ValueError: a map that is missing or of another size.
    """
    check_map(config, d2t)
    optimizer, shape = _make_optimizer(optim), batch or BatchConfig()

    def init(draft_params: Params) -> DraftState:
        params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), draft_params)
        return DraftState(params=params, opt_state=optimizer.init(params), step=jnp.int32(0), tokens=jnp.int32(0))

    def step(state: DraftState, frozen: Params, batch: DraftBatch, d2t_V: jax.Array | None):
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        grads, metrics = _accumulate(state.params, frozen, config, loss, batch, d2t_V, optim.feature_noise, key)
        state, applied = _apply(optimizer, state, grads, metrics["rows"][0])
        return state, metrics | applied

    eval_loss = dataclasses.replace(loss, num_steps=eval_steps, full_target=True)

    def evaluate(params: Params, frozen: Params, batch: DraftBatch, d2t_V: jax.Array | None):
        return _evaluate(params, frozen, config, eval_loss, batch, d2t_V)

    def make_batch(buffer: DataBuffer, rng: np.random.Generator) -> DraftBatch | None:
        windows = buffer.draw(shape.num_micro * shape.num_rows * shape.row_len, shape, rng)
        return next(make_batches(windows, shape.num_micro, shape.num_rows, shape.row_len), None)

    shapes = jax.eval_shape(init, draft_param_shapes(config))
    init_fn, step_fn = jax.jit(init), jax.jit(step, donate_argnums=0)
    if mesh is not None:
        at, one = _state_shardings(shapes, optimizer, mesh, config), replicated(mesh)
        batch_at = NamedSharding(mesh, P(None, ("data", "fsdp")))
        shapes = jax.tree.map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, at)
        init_fn = jax.jit(init, out_shardings=at)
        step_fn = jax.jit(step, donate_argnums=0, in_shardings=(at, None, batch_at, one), out_shardings=(at, one))
    eval_fn = jax.jit(evaluate)
    return DraftTrainer(
        init=init_fn,
        step=lambda state, target, batch: step_fn(state, frozen_params(target), batch, d2t),
        evaluate=lambda params, target, batch: eval_fn(params, frozen_params(target), batch, d2t),
        make_batch=make_batch,
        shapes=shapes,
    )


def _make_optimizer(config: DraftOptimConfig) -> optax.GradientTransformation:
    peak = config.learning_rate
    rate = optax.constant_schedule(peak)
    if config.total_steps:
        rate = optax.cosine_decay_schedule(peak, config.total_steps - config.warmup_steps, alpha=0.1)
    if config.warmup_steps:
        # Step i of n has (i + 1) / n of the peak: a first step at rate 0 would change nothing.
        warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
        rate = optax.join_schedules([warmup, rate], [config.warmup_steps])
    adamw = optax.adamw(
        rate,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
    )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw) if config.max_grad_norm else adamw


def _state_shardings(
    shapes: DraftState, optimizer: optax.GradientTransformation, mesh: Mesh, config: DraftConfig
) -> DraftState:
    params = param_shardings(shapes.params, mesh, PARAM_TABLE, heads=config.layer.num_kv_heads)
    one = replicated(mesh)
    opt_state = optax.tree.map_params(
        optimizer, lambda _, sharding: sharding, shapes.opt_state, params, transform_non_params=lambda _: one
    )
    return DraftState(params=params, opt_state=opt_state, step=cast(Any, one), tokens=cast(Any, one))


def _accumulate(
    params: Params,
    frozen: Params,
    config: DraftConfig,
    loss: LossConfig,
    batch: DraftBatch,
    d2t_V: jax.Array | None,
    feature_noise: float,
    key: jax.Array,
) -> tuple[Params, dict[str, jax.Array]]:
    """Gradients and metrics of all micro-batches together."""
    counts_U = count_rows(batch.mask, batch.segment_ids, loss.num_steps)
    width = feature_noise * 512 / config.target.hidden_size

    def micro(grads, args):
        part, index = args
        noise = None
        if feature_noise:
            noise = width * (jax.random.uniform(jax.random.fold_in(key, index), part.features.shape) - 0.5)
        (value, sums), new = jax.value_and_grad(draft_loss, has_aux=True)(
            params, frozen, config, loss, part, counts_U, d2t_V, noise
        )
        del sums["accept_rows"]
        return jax.tree.map(jnp.add, grads, new), (value, sums)

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, out = jax.lax.scan(micro, zeros, (batch, jnp.arange(batch.tokens.shape[0])))
    value, sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), out)
    return grads, {"loss": value} | _means(sums)


def _means(sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums by step to means over supervised rows; `rows` stays a count."""
    count_U = jnp.maximum(sums["rows"], 1.0)
    return {name: x if name == "rows" else x / count_U for name, x in sums.items()}


def _apply(
    optimizer: optax.GradientTransformation, state: DraftState, grads: Params, num_rows: jax.Array
) -> tuple[DraftState, dict[str, jax.Array]]:
    """One optimizer step, or none where the gradient is not finite."""
    grad_norm = optax.global_norm(grads)
    is_finite = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    new = (optax.apply_updates(state.params, updates), opt_state)
    # A select is fused into the update's own loops; a conditional would copy the donated state.
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old), new, (state.params, state.opt_state)
    )
    one, num = is_finite.astype(jnp.int32), jnp.where(is_finite, num_rows, 0.0).astype(jnp.int32)
    state = DraftState(params=params, opt_state=opt_state, step=state.step + one, tokens=state.tokens + num)
    return state, {"grad_norm": grad_norm, "is_applied": is_finite.astype(jnp.float32)}


def _evaluate(
    params: Params,
    frozen: Params,
    config: DraftConfig,
    loss: LossConfig,
    batch: DraftBatch,
    d2t_V: jax.Array | None,
) -> dict[str, jax.Array]:
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    counts_U = count_rows(flat.mask, flat.segment_ids, loss.num_steps)
    value, sums = draft_loss(params, frozen, config, loss, flat, counts_U, d2t_V)
    rounds = expected_rounds(sums.pop("accept_rows"), flat.mask, flat.segment_ids)
    committed = jnp.sum(flat.mask, dtype=jnp.float32)
    return {"loss": value, "rounds": rounds, "committed": committed} | _means(sums)


def expected_rounds(accept_UBT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """f32[], target forwards that chains of U drafts are expected to need for all supervised rows.

    A round at row t drafts the tokens of rows t, t+1, ...: draft k is accepted with a(x) at row t+k of step k, and the
    next round begins at the row after the first that is not, whose token the target added itself. Noise of different
    positions is independent, so the chances that a round begins at each row follow from one another.

    Args:
      accept_UBT: a(x) by step; 0 where the row is not supervised at that step.
      mask_BT: supervised rows.
      segment_ids_BT: of packed windows; each begins with a round of its own.
    """
    U, B, _ = accept_UBT.shape
    before_BT = jnp.pad(mask_BT & (segment_ids_BT == jnp.roll(segment_ids_BT, -1, axis=1)), ((0, 0), (1, 0)))[:, :-1]
    first_BT = mask_BT & ~before_BT
    ahead_UBT = jnp.stack([jnp.pad(accept_UBT[k, :, k:], ((0, 0), (0, k))) for k in range(U)])
    run_UBT = jnp.cumprod(ahead_UBT, axis=0)  # chance that drafts 0 ... k are all accepted
    kept_UBT = jnp.concatenate([jnp.ones_like(run_UBT[:1]), run_UBT])
    stops_UBT = kept_UBT - jnp.concatenate([run_UBT, jnp.zeros_like(run_UBT[:1])])  # exactly k of them, k = 0 ... U

    def step(begin_UB, xs):  # chances that a round begins at this row, the next, ...
        first_B, mask_B, stops_UB = xs
        begin_B = jnp.where(first_B, 1.0, begin_UB[0]) * mask_B
        begin_UB = jnp.concatenate([begin_UB[1:], jnp.zeros((1, B))]) + begin_B * stops_UB
        return begin_UB, jnp.sum(begin_B)

    xs = (first_BT.T, mask_BT.T, stops_UBT.transpose(2, 0, 1))
    return jnp.sum(jax.lax.scan(step, jnp.zeros((U + 1, B)), xs)[1])
