"""A tiny policy and made-up rollouts, shared by the learner's tests."""

import functools

import jax
import numpy as np

from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import init_params
from tlt_jax.rl.batch import PackConfig, TrainBatch, assign_advantages, make_batch
from tlt_jax.rl.steps import LearnerConfig
from tlt_jax.types import Completion, SamplingParams

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    tie_embeddings=True,
    num_valid_tokens=37,
    max_position_embeddings=128,
)
LEARNER = LearnerConfig(pack=PackConfig(micro_batch_tokens=64, min_width=64), head_tokens=32)  # one shape: [1,64]


@functools.cache
def params(seed=0, scale=8.0, config=CONFIG):
    """Random weights, larger than at initialisation, so that next-token laws are far from uniform."""
    return jax.tree.map(lambda x: x * scale if x.ndim == 2 else x, init_params(config, jax.random.key(seed)))


def completions(prompt_lens=(3, 9, 5), group_size=2, max_len=11, seed=0, vocab=37):
    """Responses of uneven length to prompts of uneven length, log-probs made up."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt_id, prompt_len in enumerate(prompt_lens):
        prompt = tuple(int(t) for t in rng.integers(0, vocab, prompt_len))
        for sample in range(group_size):
            num_tokens = int(rng.integers(1, max_len + 1))
            rows.append(
                Completion(
                    request_id=100 * prompt_id + sample,
                    prompt_id=prompt_id,
                    sample=sample,
                    prompt_ids=prompt,
                    token_ids=rng.integers(0, vocab, num_tokens).astype(np.int32),
                    logprobs=rng.normal(-2.0, 0.5, num_tokens).astype(np.float32),
                    finish_reason="stop" if num_tokens < max_len else "length",
                )
            )
    return rows


def batch(algo, rewards=None, temperature=1.0, **kwargs) -> TrainBatch:
    """A rollout with advantages."""
    rows = completions(**kwargs)
    group_size = kwargs.get("group_size", 2)
    rewards = np.arange(len(rows)) % group_size if rewards is None else rewards
    made = make_batch(rows, SamplingParams(temperature=temperature, max_tokens=11))
    kl_sums = np.zeros(len(rows)) if algo.kl_in == "reward" else None
    return assign_advantages(made, rewards, group_size, algo, kl_sums)[0]
