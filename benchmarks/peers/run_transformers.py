# pyright: reportMissingImports=false
"""Hugging Face transformers on torch's CPU build: `generate` (rollout) and a plain GRPO step (train).

Rollout: consecutive static batches, prompts padded left; a batch runs `max_new_tokens` = its longest response with no
end id, each row is cut to its own length, and only those tokens count. `options`:
  cache     "dynamic" (default: grows with the live length, the faster one on CPU) or "static" (one buffer of kv_tokens)
  compile   true: torch.compile of the decode forward (needs cache "static")
  attention "sdpa" (default) or "eager"
Sampling warpers that generation defaults would add (top-k 50) are off.

Train: `torch_train.py`.
"""

import os
from typing import Any

from benchmarks.peers import harness
from benchmarks.peers.job import JobError, RolloutJob, TrainJob

PACKAGES = ("transformers", "torch", "numpy", "safetensors")


def load_model(job: RolloutJob | TrainJob) -> Any:
    """The causal model in the job's dtype; sets torch's thread pools."""
    import torch
    import transformers

    torch.set_num_threads(job.threads)
    transformers.utils.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(
        job.model_dir,
        dtype=getattr(torch, job.dtype),
        attn_implementation=job.options.get("attention", "sdpa"),
        local_files_only=True,
    )


def run_rollout(job: RolloutJob) -> dict[str, Any]:
    import torch
    import transformers

    model = load_model(job).eval()
    settings = {"cache": job.options.get("cache", "dynamic"), "compile": bool(job.options.get("compile", False))}
    if settings["compile"]:
        if settings["cache"] != "static":
            raise JobError("options.compile: got cache 'dynamic', expected 'static'; set options.cache to 'static'")
        model.forward = torch.compile(model.forward, dynamic=False)
    sampling: dict[str, Any] = {"do_sample": False}
    if job.temperature > 0:
        sampling = {"do_sample": True, "temperature": float(job.temperature), "top_k": 0, "top_p": 1.0}

    def generate(batch: list[int]) -> list[list[int]]:
        width = max(len(job.prompts[i]) for i in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch):
            ids[row, width - len(job.prompts[i]) :] = torch.tensor(job.prompts[i])
            mask[row, width - len(job.prompts[i]) :] = 1
        config = transformers.GenerationConfig(
            max_new_tokens=max(job.max_new_tokens[i] for i in batch),
            eos_token_id=job.stop_token_ids or None,
            pad_token_id=0,
            cache_implementation="static" if settings["cache"] == "static" else None,
            **sampling,
        )
        config.max_cache_len = job.kv_capacity
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return out[:, width:].tolist()

    def run_once(seed: int) -> harness.Generated:
        torch.manual_seed(seed)
        tokens, slots = [], 0
        for batch in harness.static_batches(job):
            rows = generate(batch)
            tokens += [harness.cut(row, job, i) for row, i in zip(rows, batch, strict=True)]
            slots += len(rows[0]) * len(batch)
        return harness.Generated([len(row) for row in tokens], slots, tokens)

    model.generation_config = transformers.GenerationConfig()  # the checkpoint's own is not the job's
    settings |= {"serving": "static batches", "sampling": sampling, "attention": model.config._attn_implementation}
    return harness.measure_rollout(job, run_once) | {"versions": harness.versions(*PACKAGES), "settings": settings}


def run_train(job: TrainJob) -> dict[str, Any]:
    from benchmarks.peers.torch_train import make_step

    logprob_pass, update = make_step(job, load_model(job))
    settings = {"padding": "micro-batch longest", "remat": job.remat, "micro_batch": job.micro_batch}
    result = harness.measure_train(job, logprob_pass, update)
    return result | {"versions": harness.versions(*PACKAGES), "settings": settings}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    harness.run_peer_main("transformers", {"rollout": run_rollout, "train": run_train})
