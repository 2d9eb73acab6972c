"""`launch.bench drafter`: drafter training on packed rows against padded ones, on long-tailed response lengths.

Lengths are drawn from the law "reasoning" (`rl.lengths`), with a row of the packed batch as the longest. Tokens,
features and frozen weights are random, in the shapes of the run's model: speed does not depend on them. Every
contestant trains on the same sequences once a pass, host work included:

    packed         rows of `drafter.batch`, filled first-fit
    padded         as many sequences an optimizer step as packed has on average, in micro-batches of as many rows,
                   padded to the longest of the step
    padded_small   one micro-batch an optimizer step, padded to its own longest: less padding, more steps

Padded lengths are multiples of an eighth of a row, so that few programs are compiled. The loss skips rows that are not
supervised in all of them; what padding costs here is the drafter's layer, not the head.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from launch.fetch import resolve_model
from launch.run_config import RunConfig
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.loss import DraftBatch
from tlt_jax.drafter.model import frozen_params, init_draft_params
from tlt_jax.drafter.packing import BatchConfig, Window, WindowConfig, cut_windows, make_batches
from tlt_jax.drafter.train import DraftState, DraftTrainer, make_draft_trainer
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.hf import load_config
from tlt_jax.models.transformer import param_shapes
from tlt_jax.rl.lengths import draw_len
from tlt_jax.types import FeatureTrace, Params

LAW = "reasoning"
_NUM_BUCKETS = 8  # of padded lengths

Batches = Callable[[], Iterator[DraftBatch]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sized:
    """A run's drafter and what it reads of the target, in size and dtype; the weights are random."""

    config: DraftConfig
    draft_params: Params
    frozen: Params  # the target's embedding and, where it has one, its head
    trainer: DraftTrainer

    def facts(self) -> dict[str, Any]:
        """The sizes that a result names."""
        target = self.config.target
        return {
            "model_type": target.model_type,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": self.config.vocab_size,
            "form": self.config.form,
            "trainable_params": sum(x.size for x in jax.tree.leaves(self.draft_params)),
        }


def make_sized(run: RunConfig) -> Sized:
    """The drafter of a run's config, whatever lies at `drafter.path`; a reduced vocabulary keeps the first ids.

    Raises:
      ValueError: settings that do not fit the model.
    """
    settings = run.drafter
    config = settings.draft_config(load_config(resolve_model(run.model.path), dtype=run.model.dtype))
    assert settings.loss is not None
    trainer = make_draft_trainer(
        config,
        settings.loss,
        settings.optim,
        batch=settings.batch,
        d2t=np.zeros(config.draft_vocab_size, np.int32) if config.draft_vocab_size else None,
        seed=settings.seed,
    )
    draft_params = init_draft_params(config, jax.random.key(settings.seed))
    frozen = _random_frozen(config.target, run.model.dtype)
    return Sized(config=config, draft_params=draft_params, frozen=frozen, trainer=trainer)


def _random_frozen(target: ModelConfig, dtype: str) -> Params:
    rng = np.random.default_rng(0)
    shapes = frozen_params(param_shapes(target))
    return jax.tree.map(lambda x: jnp.asarray(0.02 * rng.standard_normal(x.shape, np.float32), dtype), shapes)


def make_windows(config: DraftConfig, row_len: int, prompt_len: int, num: int, seed: int) -> list[Window]:
    """One window for each of `num` responses of drawn length to prompts of `prompt_len`; the longest fills a row.

    Raises:
      ValueError: prompts that leave no room for a response.
    """
    if not 1 <= prompt_len <= row_len - 2 or num < 1:
        raise ValueError(
            f"bench drafter: got {num} sequences with prompts of {prompt_len} tokens for rows of {row_len}, expected "
            "at least one, and prompts that leave two rows; set drafter.batch.row_len"
        )
    rng = np.random.default_rng([seed, num])
    whole = WindowConfig(row_len=row_len, context_len=prompt_len - 1)
    windows = []
    for i in range(num):
        # The last of n tokens is never read, so that n-1 rows train n-1-prompt_len of them: two tokens at least.
        response_len = max(draw_len(LAW, row_len + 1 - prompt_len, seed, i), 2)
        trace = _random_trace(config, prompt_len, prompt_len + response_len, i, rng)
        windows += cut_windows(trace, whole)
    assert len(windows) == num
    return windows


def _random_trace(
    config: DraftConfig, prompt_len: int, num_tokens: int, request_id: int, rng: np.random.Generator
) -> FeatureTrace:
    def features(width: int) -> np.ndarray:
        return rng.standard_normal((num_tokens - 1, width), np.float32).astype(jnp.bfloat16)

    return FeatureTrace(
        request_id=request_id,
        token_ids=rng.integers(0, config.vocab_size, num_tokens, np.int32),
        prompt_len=prompt_len,
        features=features(config.feature_size),
        hidden=features(config.target.hidden_size) if config.form == "eagle3" else None,
    )


def padded_batches(windows: Sequence[Window], per_step: int, num_rows: int, row_len: int) -> Iterator[DraftBatch]:
    """A batch for every `per_step` windows, each in a row of its own, padded to a bucket that holds the longest.

    Args:
      windows: in the order in which they are trained on.
      per_step: sequences of an optimizer step.
      num_rows: rows of a micro-batch.
      row_len: the longest bucket.
    """
    bucket = -(-row_len // _NUM_BUCKETS)
    num_micro = -(-per_step // num_rows)
    for i in range(0, len(windows), per_step):
        part = windows[i : i + per_step]
        longest = max(w.num_rows for w in part)
        width = min(-(-longest // bucket) * bucket, row_len)
        yield from make_batches(part, num_micro, num_rows, width, packed=False)


def make_contestants(windows: Sequence[Window], batch: BatchConfig) -> dict[str, Batches]:
    """The three ways to make batches of the same windows; see the module's docstring."""
    packed = functools.partial(make_batches, windows, batch.num_micro, batch.num_rows, batch.row_len)
    per_step = -(-len(windows) // sum(1 for _ in packed()))
    return {
        "packed": packed,
        "padded": functools.partial(padded_batches, windows, per_step, batch.num_rows, batch.row_len),
        "padded_small": functools.partial(padded_batches, windows, batch.num_rows, batch.num_rows, batch.row_len),
    }


def drafter(run: RunConfig, num_sequences: int, prompt_len: int, repeats: int) -> dict[str, Any]:
    """Samples and supervised tokens a second of drafter training, packed and padded.

    Args:
      run: model and `drafter` section.
      num_sequences: of a pass.
      prompt_len: tokens of every prompt; they are rows too, not supervised.
      repeats: timed passes of each contestant, in turn.

    Returns:
      By contestant `NAME_samples_s` and `NAME_tok_s`, of median passes; `ratio` and `ratio_small`, samples a second of
      packed over `padded` and `padded_small`; `fill`, the share of rows that are not padding.

    Raises:
      ValueError: settings that do not fit each other.
    """
    batch = run.drafter.batch
    sized = make_sized(run)
    windows = make_windows(sized.config, batch.row_len, prompt_len, num_sequences, run.drafter.seed)
    contestants = make_contestants(windows, batch)
    first_s, walls_s = _race(sized, contestants, repeats)
    median_s = {name: statistics.median(x) for name, x in walls_s.items()}
    tokens = sum(w.last - w.first for w in windows)
    result: dict[str, Any] = {}
    for name, seconds in median_s.items():
        result |= {f"{name}_samples_s": num_sequences / seconds, f"{name}_tok_s": tokens / seconds}
    lens = [w.num_rows for w in windows]
    slots = {name: [b.tokens.size for b in batches()] for name, batches in contestants.items()}
    return {
        **result,
        "ratio": median_s["padded"] / median_s["packed"],
        "ratio_small": median_s["padded_small"] / median_s["packed"],
        "fill": {name: sum(lens) / sum(x) for name, x in slots.items()},
        "optimizer_steps": {name: len(x) for name, x in slots.items()},
        "num_sequences": num_sequences,
        "tokens": tokens,
        "rows_mean": statistics.mean(lens),
        "rows_max": max(lens),
        "prompt_len": prompt_len,
        "law": LAW,
        "batch": dataclasses.asdict(batch),
        "unroll_steps": run.drafter.loss.num_steps,
        **sized.facts(),
        "walls_s": walls_s,
        "repeats": repeats,
        "compile_s": {name: max(first_s[name] - median_s[name], 0.0) for name in contestants},
        "machine": machine.describe(),
    }


def _race(
    sized: Sized, contestants: dict[str, Batches], repeats: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Seconds of each contestant's first pass, which compiles, and of the `repeats` after it."""
    state = sized.trainer.init(sized.draft_params)
    first_s: dict[str, float] = {}
    walls_s: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(repeats + 1):
        for name, batches in contestants.items():
            state, seconds = _pass(sized, state, batches)
            if i == 0:
                first_s[name] = seconds
            else:
                walls_s[name].append(seconds)
    return first_s, walls_s


def _pass(sized: Sized, state: DraftState, batches: Batches) -> tuple[DraftState, float]:
    start_s = time.perf_counter()
    for batch in batches():
        state, _ = sized.trainer.step(state, sized.frozen, batch)
    jax.block_until_ready(state)
    return state, time.perf_counter() - start_s
