# pyright: reportMissingImports=false
"""TRL's `GRPOTrainer` on torch's CPU build, one optimizer step at a time (train only).

Its own loss ("dapo": clipped surrogate, token-mean over the whole batch, no KL), its own log-prob function and its
own optimizer, given the job's finished responses in place of a generation. Rows are padded to the micro-batch's
longest, as for the transformers peer. The trainer insists on a tokenizer and a data set: both are stand-ins that no
step reads.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.peers import harness
from benchmarks.peers.job import JobError, TrainJob

PACKAGES = ("trl", "transformers", "torch", "accelerate", "numpy")


def make_trainer(job: TrainJob, model: Any, output_dir: str) -> Any:
    """A GRPOTrainer with the job's optimizer settings."""
    import datasets
    import tokenizers
    import transformers
    import trl

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"0": 0}, unk_token="0"))
    special = {"eos_token": "0", "pad_token": "0", "unk_token": "0"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    config = trl.GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        report_to=[],
        loss_type="dapo",
        beta=0.0,
        epsilon=job.clip,
        temperature=job.temperature,
        learning_rate=job.learning_rate,
        weight_decay=0.0,
        max_grad_norm=job.max_grad_norm,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=len(job.prompts) // job.micro_batch,
        num_generations=len(job.prompts),
        gradient_checkpointing=job.remat,
        seed=job.seed,
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["0"]}),
        processing_class=tokenizer,
    )


def make_step(job: TrainJob, trainer: Any) -> tuple[Callable[[], object], Callable[[], dict[str, float]]]:
    """Returns `(logprob_pass, update)`, as the other train peers do."""
    import torch

    from benchmarks.peers.torch_train import make_micro_batches

    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    num_items = torch.tensor(float(sum(map(len, job.responses))))
    batches = [_as_trl_inputs(batch, job, num_items) for batch in make_micro_batches(job)]

    def logprob_pass() -> object:
        out = []
        with torch.no_grad():
            for batch in batches:
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
                width = batch["completion_ids"].size(1)
                out.append(trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0])
        return out

    def update() -> dict[str, float]:
        trainer.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            loss = trainer._compute_loss(trainer.model, batch)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), job.max_grad_norm)
        trainer.optimizer.step()
        return {"loss": total, "grad_norm": float(norm)}

    return logprob_pass, update


def _as_trl_inputs(batch: dict[str, Any], job: TrainJob, num_items: Any) -> dict[str, Any]:
    width = batch["responses"].shape[1]
    inputs = {
        "prompt_ids": batch["ids"][:, :-width],
        "prompt_mask": batch["mask"][:, :-width],
        "completion_ids": batch["responses"],
        "completion_mask": batch["mask"][:, -width:],
        "advantages": batch["advantages"][:, 0],
        "num_items_in_batch": num_items,
    }
    return inputs | ({"old_per_token_logps": batch["behaviour"]} if job.behaviour_logprobs else {})


def run_train(job: TrainJob) -> dict[str, Any]:
    from benchmarks.peers.run_transformers import load_model

    if len(job.prompts) < 2:
        raise JobError("prompts: got 1 row, expected at least 2 (TRL's smallest group); add rows")
    with tempfile.TemporaryDirectory() as folder:
        logprob_pass, update = make_step(job, make_trainer(job, load_model(job), folder))
        result = harness.measure_train(job, logprob_pass, update)
    settings = {"padding": "micro-batch longest", "remat": job.remat, "micro_batch": job.micro_batch, "loss": "dapo"}
    return result | {"versions": harness.versions(*PACKAGES), "settings": settings}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    harness.run_peer_main("trl", {"train": run_train})
