"""Trains a drafter offline: `python -m launch.train_drafter --config=configs/X.py [--data=F.jsonl] [--workdir=DIR]`.

Each line of the data is `{"prompt": text}` or `{"messages": [...]}` and, where there is one, a `response`: text, or
token ids under `response_ids`. Lines without a response are answered first, with the model and the sampling of the
config; without `--data` the prompts are the task's. The `drafter` section says what is trained and how. In the workdir:

    data.jsonl       what it is trained on, as token ids
    features.safetensors  what the rollout that wrote the responses kept of the target's features
    metrics.jsonl    loss, and held-out accept length and agreement by draft position, against steps and tokens
    checkpoints/     trainable weights, optimizer, data position, map of the vocabulary: the same command resumes
    drafter/         the best drafter so far, in the layout that SGLang loads and `drafter.path` takes

Exit codes: 0 done; 1 the run failed or was stopped (the same command resumes); 2 bad configuration or input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import shutil
import sys
import time
from typing import Any

import jax
import numpy as np
import tqdm
from absl import flags, logging

from launch import cli, drafter_data, setup
from launch.config import CONFIG, prepare_workdir, to_json
from launch.drafting import EXPORT_DIR, Drafting, check_start, start_drafter
from launch.run_config import RunConfig
from launch.run_flags import PROGRESS, WORKDIR
from tlt_jax.checkpoint import CheckpointConfig, CheckpointError, CheckpointStore
from tlt_jax.drafter import warmup
from tlt_jax.drafter.export import save_drafter
from tlt_jax.drafter.features import Recorded, make_reader
from tlt_jax.drafter.loss import DraftBatch
from tlt_jax.drafter.model import frozen_params
from tlt_jax.drafter.settings import DrafterConfig
from tlt_jax.drafter.train import DraftState, DraftTrainer, make_draft_trainer
from tlt_jax.metrics import MetricsWriter
from tlt_jax.types import Params

_DATA = flags.DEFINE_string("data", "", "JSONL file of prompts, with or without responses; default: the task's.")

DATA_FILE = "data.jsonl"
FEATURES_FILE = "features.safetensors"
_STEP_METRICS = ("loss", "grad_norm", "accept", "top1", "top3", "overlap", "feature_loss", "logit_loss")
# A resumed run may go on longer, look more often, and keep more; what it trains on and for stays.
_MAY_CHANGE = (
    *(
        "loop",
        "learner",
        "algorithm",
        "optimizer",
        "reward",
        "eval",
        "mesh",
        "checkpoint",
        "workers",
        "bandit",
        "ngram",
    ),
    *("drafter.enabled", "drafter.buffer", "drafter.optim"),
    *(f"drafter.warmup.{x}" for x in ("num_steps", "max_minutes", "patience", "eval_every", "checkpoint_every")),
)
_FAILURES = (CheckpointError, OSError, MemoryError, jax.errors.JaxRuntimeError, KeyboardInterrupt)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What a warm-up is made of, besides the trainer's state."""

    settings: DrafterConfig
    start: Drafting
    target_params: Params
    trainer: DraftTrainer
    source: warmup.BatchSource
    held_out: list[DraftBatch]
    workdir: pathlib.Path


def main() -> dict[str, Any]:
    run = cli.read_run_config()
    workdir = pathlib.Path(WORKDIR.value or f"runs/{pathlib.Path(CONFIG.value or '').stem}_drafter")
    start_s = time.perf_counter()
    with cli.checking_input():
        inputs = setup.read_inputs(run)
        check_start(run.drafter, inputs.model)
        lines = _read_data(run, inputs, workdir)
        writer = drafter_data.make_writer(run, inputs, lines)
        requests, workers, kept = writer.requests, writer.workers, writer.kept
        prepare_workdir(workdir, to_json(run), may_change=_MAY_CHANGE)
        store = CheckpointStore(workdir / "checkpoints", CheckpointConfig(num_keep=2))
        setup.load_rollout_weights(run, inputs, workers)
    try:
        with tqdm.tqdm(total=len(requests), unit="resp", disable=not (requests and PROGRESS.value)) as bar:
            lines = drafter_data.answer(lines, requests, workers, lambda p: _show(bar, p.done))
        sequences = drafter_data.as_recorded(lines)
        if kept.traces:
            kept.save(workdir / FEATURES_FILE, sequences)
        else:
            kept.load(workdir / FEATURES_FILE, sequences)
        drafter_data.save_lines(workdir / DATA_FILE, lines)
        parts = make_parts(run, inputs, workers.engines[0].weights.params, sequences, kept, workdir)
        result = run_training(parts, store)
    except _FAILURES as error:
        why = "stopped" if isinstance(error, KeyboardInterrupt) else f"failed: {type(error).__name__}: {error}"
        logging.error("%s; the same command resumes from step %s", why, store.latest_step() or 0)
        sys.exit(cli.EXIT_FAILED)
    return {"workdir": str(workdir), "drafter": str(workdir / EXPORT_DIR), **result} | {
        "seconds": time.perf_counter() - start_s
    }


def _read_data(run: RunConfig, inputs: setup.Inputs, workdir: pathlib.Path) -> list[drafter_data.Line]:
    """What an earlier start of this command has written, else the file, else the task's prompts."""
    if (workdir / DATA_FILE).exists():
        return drafter_data.read_lines(workdir / DATA_FILE, inputs, run.rollout.max_len)
    if _DATA.value:
        return drafter_data.read_lines(pathlib.Path(_DATA.value), inputs, run.rollout.max_len)
    return drafter_data.task_lines(setup.load_task(run, inputs), run.drafter.warmup.num_prompts)


def _show(bar: tqdm.tqdm, done: int) -> None:
    bar.n = done
    bar.refresh()


def make_parts(
    run: RunConfig,
    inputs: setup.Inputs,
    target_params: Params,
    sequences: list[Recorded],
    kept: drafter_data.Kept,
    workdir: pathlib.Path,
) -> Parts:
    """Chooses the vocabulary, reads the held-out features, and builds the trainer.

    Args:
      run: the configuration.
      inputs: the model.
      target_params: its weights.
      sequences: the data.
      kept: features of the rollout, of some of them.
      workdir: of the run.
    """
    settings, model = run.drafter, inputs.model
    train_on, held_out = warmup.split_held_out(sequences, settings.warmup.held_out, settings.seed)
    start = start_drafter(settings, model, train_on)
    assert settings.loss is not None
    trainer = make_draft_trainer(
        start.config,
        settings.loss,
        settings.warmup.optim,
        batch=settings.batch,
        d2t=start.d2t,
        seed=settings.seed,
    )
    read = functools.partial(
        make_reader(model, start.config.feature_layers, context_len=settings.batch.context_len), target_params
    )
    read = kept.read_first(read)
    bytes_per_token = 2 * (start.config.feature_size + (model.hidden_size if settings.form == "eagle3" else 0))
    shards = warmup.make_shards(train_on, bytes_per_token, settings.buffer.max_bytes)
    logging.info("%d sequences to train on in %d shards, %d held out", len(train_on), len(shards), len(held_out))
    return Parts(
        settings=settings,
        start=start,
        target_params=target_params,
        trainer=trainer,
        source=warmup.BatchSource(shards, read, settings.batch, settings.seed),
        held_out=warmup.held_out_batches(list(read(held_out)), settings.batch),
        workdir=workdir,
    )


def run_training(parts: Parts, store: CheckpointStore) -> dict[str, Any]:
    """From the newest checkpoint, if there is one, to the end."""
    state, progress = _restore(parts, store)
    config, first_step = parts.settings.warmup, int(state.step)
    writer = MetricsWriter(parts.workdir, first_step=first_step + 1 if first_step else 0)
    bar = tqdm.tqdm(total=config.num_steps, initial=first_step, unit="step", disable=not PROGRESS.value)
    pending: dict[str, float] = {}

    def on_step(step: int, metrics: dict[str, float]) -> None:
        pending.update({f"drafter/{name}": x for name, x in metrics.items() if name in _STEP_METRICS})
        bar.update(step - bar.n)
        bar.set_postfix_str(f"loss {metrics['loss']:.3f}, accept length {progress.best_accept_len:.2f}")

    def on_eval(seen: warmup.Evaluated, params: Params | None) -> None:
        writer.write(seen.step, {**pending, "drafter/tokens": seen.tokens, **seen.metrics})
        logging.info("step %d, %d tokens: held-out accept length %.3f", seen.step, seen.tokens, seen.accept_len)
        if params is not None:
            _export(parts, params)

    def save(state: DraftState, progress: warmup.Progress) -> None:
        items = {"drafter": state, "progress": progress.to_json()} | _map_item(parts.start)
        summary = {"optimizer_steps": int(state.step), "tokens": int(state.tokens), "best": progress.best_accept_len}
        store.save(int(state.step), items, summary=summary)

    hooks = warmup.Hooks(on_step=on_step, on_eval=on_eval, save=save)
    with contextlib.closing(writer), bar:
        state = warmup.train(
            config,
            parts.trainer,
            frozen_params(parts.target_params),
            state,
            parts.source,
            parts.held_out,
            progress,
            hooks,
        )
        store.wait()
        if store.latest_step() != int(state.step):
            save(state, progress)
        store.close()
    logging.info("stopped: %s", progress.stopped)
    return {
        "steps": int(state.step),
        "tokens": int(state.tokens),
        "accept_len": progress.best_accept_len,
        "best_step": progress.best_step,
        "stopped": progress.stopped,
    }


def _map_item(start: Drafting) -> dict[str, Any]:
    return {} if start.d2t is None else {"d2t": {"offsets": np.asarray(start.d2t, np.int32)}}


def _restore(parts: Parts, store: CheckpointStore) -> tuple[DraftState, warmup.Progress]:
    if store.latest_step() is None:
        return parts.trainer.init(parts.start.params), warmup.Progress()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), parts.trainer.shapes)
    restored = store.restore({"drafter": target, "progress": None})
    assert restored is not None
    logging.info("%s", restored.describe())
    return restored.items["drafter"], warmup.Progress.from_json(restored.items["progress"])


def _export(parts: Parts, params: Params) -> None:
    """Replaces the exported drafter; a kill in between leaves the new one under another name, or both."""
    out = parts.workdir / EXPORT_DIR
    new, old = out.with_name(f"{EXPORT_DIR}.new"), out.with_name(f"{EXPORT_DIR}.old")
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)
    save_drafter(new, parts.start.config, params, parts.start.d2t)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    cli.run(main)
