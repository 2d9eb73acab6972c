# pyright: reportMissingImports=false
"""google-tunix: its vanilla `Sampler` (rollout) and its GRPO loss under its trainer's step (train).

Rollout: the sampler has no refill, so requests run as consecutive static batches, as tunix's own `RLCluster.generate`
serves them. Lengths are enforced without a stop id (the id given as end-of-sequence lies outside the vocabulary): a
batch is asked for its longest response, each row is then cut to its own length, and only those tokens count. Prompts
are padded to one length; the cache holds `kv_tokens`. Temperature 1 is `top_p=1, top_k=None`, the sampler's cheap
path; temperature 0 its greedy mode.

Train: tunix's `PeftTrainer` step (nnx.jit, gradient accumulation by optax.MultiSteps) on tunix's `grpo_loss_fn`,
token-mean; prompts padded left and responses right to the batch's longest, one shape for the whole batch.
"""

import os
from typing import Any

from benchmarks.peers import harness
from benchmarks.peers.job import RolloutJob, TrainJob

PACKAGES = ("google-tunix", "jax", "jaxlib", "flax", "optax", "numpy")


def run_rollout(job: RolloutJob) -> dict[str, Any]:
    from tunix.generate import sampler as sampler_lib

    from benchmarks.peers.tunix_model import load_model

    model, config = load_model(job.model_dir, job.dtype)
    no_id = config.vocab_size + 1

    class IdTokenizer:
        """Prompts are strings of ids; the padding id is outside the vocabulary so that no prompt token is masked."""

        def encode(self, text: str, **_: Any) -> list[int]:
            return [int(piece) for piece in text.split()]

        def decode(self, ids: list[int], **_: Any) -> str:
            return ""

        def bos_id(self) -> None:
            return None  # none is added, none removed

        def pad_id(self) -> int:
            return no_id

        def eos_id(self) -> int:
            return no_id

    cache = sampler_lib.CacheConfig(job.kv_capacity, config.num_layers, config.num_kv_heads, config.head_dim)
    sampler = sampler_lib.Sampler(model, IdTokenizer(), cache)
    max_prompt_len = max(map(len, job.prompts))
    sampling = {"temperature": float(job.temperature)} | ({"top_p": 1.0} if job.temperature > 0 else {})

    def run_once(seed: int) -> harness.Generated:
        lengths, tokens, slots = [], [], 0
        for batch in harness.static_batches(job):
            longest = max(job.max_new_tokens[i] for i in batch)
            out = sampler(
                input_strings=[" ".join(map(str, job.prompts[i])) for i in batch],
                max_generation_steps=longest,
                max_prompt_length=max_prompt_len,
                eos_tokens=job.stop_token_ids or [no_id],
                seed=seed * 1009 + batch[0],
                **sampling,
            )
            # The sampler drops the stop token; it was generated and counts.
            ran = [min(len(row) + (len(row) < longest), longest) for row in out.tokens]
            lengths += [min(n, job.max_new_tokens[i]) for n, i in zip(ran, batch, strict=True)]
            tokens += [row[: job.max_new_tokens[i]].tolist() for row, i in zip(out.tokens, batch, strict=True)]
            slots += max(ran) * len(batch)
        return harness.Generated(lengths, slots, tokens)

    settings = {"serving": "static batches", "sampling": sampling, "cache_tokens": job.kv_capacity}
    return harness.measure_rollout(job, run_once) | {"versions": harness.versions(*PACKAGES), "settings": settings}


def run_train(job: TrainJob) -> dict[str, Any]:
    from benchmarks.peers.tunix_train import make_step

    logprob_pass, update = make_step(job)
    settings = {"padding": "batch longest", "remat": job.remat, "micro_batch": job.micro_batch}
    result = harness.measure_train(job, logprob_pass, update)
    return result | {"versions": harness.versions(*PACKAGES), "settings": settings}


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    harness.run_peer_main("tunix", {"rollout": run_rollout, "train": run_train})
