"""`launch.bench losses`: the drafter trained with one logit loss after the other, on the same data from the same start.

Life of a comparison:
1. The model answers prompts of the run's task, and the rollout keeps the features, once for all losses.
2. Every loss gets a trainer of its own, the same first weights and the same batches in the same order. All else of
   `drafter.loss` (unroll steps, weights, temperature) is the run's.
3. They train in turn, a part of the steps each, so that a busy moment of the machine meets all of them. After each part
   the held-out accept length of chains of five drafts is measured. Neither this nor making batches is in the seconds.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import machine
from launch import drafter_data, setup
from launch.drafting import check_start
from launch.run_config import RunConfig
from launch.train_drafter import Parts, make_parts
from tlt_jax.drafter import warmup
from tlt_jax.drafter.config import LossConfig
from tlt_jax.drafter.loss import DraftBatch
from tlt_jax.drafter.model import frozen_params
from tlt_jax.drafter.train import DraftState, DraftTrainer, make_draft_trainer
from tlt_jax.types import Params


@dataclasses.dataclass(kw_only=True)
class Contestant:
    """A drafter in training, and what it has shown."""

    trainer: DraftTrainer
    state: DraftState
    batches: Iterator[tuple[DraftBatch, warmup.Position]]
    compile_s: float
    walls_s: list[float] = dataclasses.field(default_factory=list)  # of each step
    curve: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def train(self, num_steps: int, frozen: Params) -> None:
        """Takes so many optimizer steps."""
        for _ in range(num_steps):
            batch, _ = next(self.batches)
            start_s = time.perf_counter()
            self.state, _ = self.trainer.step(self.state, frozen, batch)
            jax.block_until_ready(self.state)
            self.walls_s.append(time.perf_counter() - start_s)

    def look(self, metrics: dict[str, float]) -> None:
        """Notes what `warmup.evaluate` found."""
        seen = {"step": len(self.walls_s), "train_s": sum(self.walls_s), "accept_len": metrics["drafter/accept_len"]}
        self.curve.append(seen | {"top1": metrics["drafter/top1/1"], "overlap": metrics["drafter/overlap/1"]})

    def row(self) -> dict[str, Any]:
        """Of the result; `gain_per_s` is the accept length gained per second of training."""
        first, last = self.curve[0], self.curve[-1]
        return {
            "accept_len": last["accept_len"],
            "train_s": last["train_s"],
            "gain_per_s": (last["accept_len"] - first["accept_len"]) / last["train_s"],
            "step_ms": 1e3 * statistics.median(self.walls_s),
            "compile_s": self.compile_s,
            "tokens": int(self.state.tokens),
            "curve": self.curve,
        }


def losses(run: RunConfig, names: Sequence[str], steps: int, num_prompts: int, looks: int) -> dict[str, Any]:
    """Held-out accept length and seconds of training, by logit loss.

    Args:
      run: model, task and `drafter` section; `drafter.warmup` says how many responses a prompt gets, how many are
        held out, and the optimizer.
      names: of `laws.LOSSES`.
      steps: optimizer steps with each.
      num_prompts: of the task, answered once.
      looks: measurements on the way, the last one included.

    Returns:
      `rows` by loss, `best_accept_len` and `best_gain_per_s`, names; and the accept length that all start from.

    Raises:
      ValueError: an unknown loss, or settings that do not fit each other.
    """
    if not 1 <= looks <= steps:
        raise ValueError(f"bench losses: got {looks} looks at {steps} steps, expected one to {steps}")
    assert run.drafter.loss is not None
    choices = {name: dataclasses.replace(run.drafter.loss, logit_loss=name) for name in names}
    start_s = time.perf_counter()
    parts, facts = _generate(run, num_prompts)
    facts["data_s"] = time.perf_counter() - start_s
    frozen = frozen_params(parts.target_params)
    contestants = {name: _make_contestant(parts, loss, frozen) for name, loss in choices.items()}
    for i in range(looks + 1):
        for c in contestants.values():
            c.train(steps * i // looks - len(c.walls_s), frozen)
            c.look(warmup.evaluate(parts.trainer, c.state.params, frozen, parts.held_out))
    rows = {name: c.row() for name, c in contestants.items()}
    return {
        "rows": rows,
        "best_accept_len": max(rows, key=lambda name: rows[name]["accept_len"]),
        "best_gain_per_s": max(rows, key=lambda name: rows[name]["gain_per_s"]),
        "accept_len_start": next(iter(contestants.values())).curve[0]["accept_len"],
        "steps": steps,
        **facts,
        "loss": dataclasses.asdict(run.drafter.loss) | {"logit_loss": "by row"},
        "batch": dataclasses.asdict(run.drafter.batch),
        "temperature": run.sampling.temperature,
        "machine": machine.describe(),
    }


def _generate(run: RunConfig, num_prompts: int) -> tuple[Parts, dict[str, Any]]:
    """Data, held-out batches and the drafter to start from, as `launch.train_drafter` makes them."""
    inputs = setup.read_inputs(run)
    check_start(run.drafter, inputs.model)
    lines = drafter_data.task_lines(setup.load_task(run, inputs), num_prompts)
    writer = drafter_data.make_writer(run, inputs, lines)
    setup.load_rollout_weights(run, inputs, writer.workers)
    answered = drafter_data.answer(lines, writer.requests, writer.workers, None)
    sequences = drafter_data.as_recorded(answered)  # of no line with a response: their ids are the requests'
    params = writer.workers.engines[0].weights.params
    parts = make_parts(run, inputs, params, sequences, writer.kept, pathlib.Path())
    facts = {
        "num_prompts": len(lines),
        "num_sequences": len(sequences),
        "num_tokens": sum(len(s.token_ids) - s.prompt_len for s in sequences),
        "held_out_tokens": sum(int(batch.mask.sum()) for batch in parts.held_out),
        "draft_vocab_size": parts.start.config.vocab_size,
        "drafter": run.drafter.path.rsplit("/", 1)[-1],
    }
    return parts, facts


def _make_contestant(parts: Parts, loss: LossConfig, frozen: Params) -> Contestant:
    """Compiled, on a state that is thrown away."""
    settings, start = parts.settings, parts.start
    trainer = make_draft_trainer(
        start.config, loss, settings.warmup.optim, batch=settings.batch, d2t=start.d2t, seed=settings.seed
    )
    batch, _ = next(parts.source.batches(warmup.Position()))
    start_s, state = time.perf_counter(), trainer.init(start.params)
    for _ in range(2):  # a step's state lies where the target does, the first one where jax put it: two programs
        state, _ = trainer.step(state, frozen, batch)
    jax.block_until_ready(state)
    compile_s = time.perf_counter() - start_s
    return Contestant(
        trainer=trainer,
        state=trainer.init(start.params),
        batches=parts.source.batches(warmup.Position()),
        compile_s=compile_s,
    )
