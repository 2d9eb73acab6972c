# pyright: reportMissingImports=false
"""The train job as a plain torch loop over a transformers model; for the `transformers` and `trl` environments.

Per micro-batch: rows padded to the micro-batch's longest, logits of response positions only (`logits_to_keep`),
log-softmax in f32, clipped surrogate, loss divided by the response tokens of the whole batch, backward; then one clip
and AdamW.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers.job import TrainJob


def make_step(job: TrainJob, model: Any) -> tuple[Callable[[], object], Callable[[], dict[str, float]]]:
    """Returns `(logprob_pass, update)`."""
    model.train()
    model.config.use_cache = False
    if job.remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0)
    micro_batches = make_micro_batches(job)
    num_response_tokens = sum(map(len, job.responses))

    def logprob_pass() -> object:
        with torch.inference_mode():
            return [_response_logprobs(model, batch, job.temperature) for batch in micro_batches]

    def update() -> dict[str, float]:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in micro_batches:
            logprobs = _response_logprobs(model, batch, job.temperature)
            behaviour = batch["behaviour"] if job.behaviour_logprobs else logprobs.detach()
            ratio = (logprobs - behaviour).exp()
            clipped = ratio.clamp(1 - job.clip, 1 + job.clip)
            token_loss = -torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
            loss = (token_loss * batch["response_mask"]).sum() / num_response_tokens
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        optimizer.step()
        return {"loss": total, "grad_norm": float(norm)}

    return logprob_pass, update


def make_micro_batches(job: TrainJob) -> list[dict[str, torch.Tensor]]:
    """The job's rows in order, `micro_batch` at a time, as padded tensors."""
    starts = range(0, len(job.prompts), job.micro_batch)
    return [_make_micro_batch(job, range(start, start + job.micro_batch)) for start in starts]


def _make_micro_batch(job: TrainJob, rows: range) -> dict[str, torch.Tensor]:
    """Prompts end and responses start at one column: padding left of the prompt and right of the response."""
    prompt_width = max(len(job.prompts[i]) for i in rows)
    response_width = max(len(job.responses[i]) for i in rows)
    ids = torch.zeros((len(rows), prompt_width + response_width), dtype=torch.long)
    mask, behaviour = torch.zeros_like(ids), torch.zeros((len(rows), response_width))
    for row, i in enumerate(rows):
        start, num_response = prompt_width - len(job.prompts[i]), len(job.responses[i])
        ids[row, start : prompt_width + num_response] = torch.tensor(job.prompts[i] + job.responses[i])
        mask[row, start : prompt_width + num_response] = 1
        if job.behaviour_logprobs:
            behaviour[row, :num_response] = torch.tensor(job.behaviour_logprobs[i])
    return {
        "ids": ids,
        "mask": mask,
        "positions": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, prompt_width:],
        "response_mask": mask[:, prompt_width:].float(),
        "behaviour": behaviour,
        "advantages": torch.tensor([job.advantages[i] for i in rows], dtype=torch.float32)[:, None],
    }


def _response_logprobs(model: Any, batch: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
    width = batch["responses"].shape[1]
    out = model(
        input_ids=batch["ids"],
        attention_mask=batch["mask"],
        position_ids=batch["positions"],
        logits_to_keep=width + 1,
        use_cache=False,
    )
    logits = out.logits[:, :-1].float() / temperature
    chosen = logits.gather(-1, batch["responses"][..., None])[..., 0]
    return chosen - logits.logsumexp(-1)
