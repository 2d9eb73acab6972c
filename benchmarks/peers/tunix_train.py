# pyright: reportMissingImports=false
"""The train job under tunix's trainer; runs in the `tunix` environment only."""

from collections.abc import Callable, Iterator

import jax
import numpy as np
import optax
from flax import nnx
from tunix.rl import algo_core, common
from tunix.rl.grpo import grpo_learner
from tunix.sft import peft_trainer

from benchmarks.peers.job import JobError, TrainJob
from benchmarks.peers.tunix_model import load_model


def make_step(job: TrainJob) -> tuple[Callable[[], object], Callable[[], dict[str, float]]]:
    """Returns `(logprob_pass, update)`: both walk the micro-batches of the job and block until done.

    Departure of tunix's: gradients of the micro-batches are averaged (optax.MultiSteps), so with unequal token counts
    its loss is a mean of means, not the mean over tokens.
    """
    model, config = load_model(job.model_dir, job.dtype, job.remat)
    pad_id = _unused_id(job, config.vocab_size)
    num_micro = len(job.prompts) // job.micro_batch
    adamw = optax.adamw(job.learning_rate, weight_decay=0.0)
    optimizer = optax.chain(optax.clip_by_global_norm(job.max_grad_norm), adamw)
    training = peft_trainer.TrainingConfig(
        eval_every_n_steps=1_000_000, gradient_accumulation_steps=num_micro if num_micro > 1 else None
    )
    trainer = peft_trainer.PeftTrainer(model, optimizer, training)
    algorithm = grpo_learner.GRPOConfig(loss_agg_mode="token-mean", beta=0.0, epsilon=job.clip)
    algorithm.temperature = job.temperature

    def loss_fn(model, train_example):
        return algo_core.grpo_loss_fn(model, train_example, algorithm, pad_id, pad_id)

    trainer = trainer.with_loss_fn(loss_fn, has_aux=True).with_gen_model_input_fn(lambda x: {"train_example": x})
    train_step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
    micro_batches = list(_micro_batches(job, pad_id))

    def logprob_pass() -> object:
        graphdef, state = nnx.split(model)
        outs = [
            common.compute_per_token_logps(
                graphdef, state, batch.prompt_ids, batch.completion_ids, pad_id, pad_id, temperature=job.temperature
            )
            for batch in micro_batches
        ]
        return jax.block_until_ready(outs)

    def update() -> dict[str, float]:
        outs = [train_step(batch) for batch in micro_batches]
        jax.block_until_ready(nnx.state(model))
        # The step reports the norm of a micro-batch's gradient; it is the batch's own only when there is one.
        norm = {"grad_norm": float(outs[0][2])} if num_micro == 1 else {}
        return {"loss": float(np.mean([float(out[0]) for out in outs]))} | norm

    return logprob_pass, update


def _unused_id(job: TrainJob, vocab_size: int) -> int:
    """A padding id: tunix masks every token equal to it, and one outside the vocabulary gives NaN log-probs.

    Raises:
      JobError: the batch holds every id of the vocabulary.
    """
    used = {token for rows in (job.prompts, job.responses) for row in rows for token in row}
    free = next((token for token in range(vocab_size) if token not in used), None)
    if free is None:
        raise JobError(f"batch: got all {vocab_size} ids in use, expected one left for padding; shorten the batch")
    return free


def _micro_batches(job: TrainJob, pad_id: int) -> Iterator[grpo_learner.TrainExample]:
    prompt_width, response_width = (max(map(len, rows)) for rows in (job.prompts, job.responses))
    for start in range(0, len(job.prompts), job.micro_batch):
        rows = range(start, start + job.micro_batch)
        prompts = np.full((len(rows), prompt_width), pad_id, np.int32)
        responses = np.full((len(rows), response_width), pad_id, np.int32)
        behaviour = np.zeros((len(rows), response_width), np.float32)
        for i, row in enumerate(rows):
            prompts[i, prompt_width - len(job.prompts[row]) :] = job.prompts[row]
            responses[i, : len(job.responses[row])] = job.responses[row]
            if job.behaviour_logprobs:
                behaviour[i, : len(job.responses[row])] = job.behaviour_logprobs[row]
        yield grpo_learner.TrainExample(
            prompt_ids=jax.numpy.asarray(prompts),
            prompt_mask=jax.numpy.asarray(prompts != pad_id),
            completion_ids=jax.numpy.asarray(responses),
            completion_mask=jax.numpy.asarray(responses != pad_id),
            advantages=jax.numpy.asarray(job.advantages[start : start + job.micro_batch], dtype=np.float32),
            ref_per_token_logps=None,
            old_per_token_logps=jax.numpy.asarray(behaviour) if job.behaviour_logprobs else None,
        )
