"""GRPO on SmolLM2-135M-Instruct: sums of two numbers, the last number of the response is the answer.

Command:   python -m launch.train --config=configs/smollm2_135m.py --workdir=runs/smollm2
Hardware:  2 CPU cores, 8 GiB of memory; any GPU.
Expect:    the model starts near a quarter of right answers and has room to rise; 80 steps are about an hour on 2 cores.
           rl/reward_mean is noisy (32 responses a step): read eval/reward_mean, every 20 steps.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {"path": "smollm2-135m"}
    config.task = {
        "source": "reasoning_gym",
        "dataset": "chain_sum",
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        "size": 4096,
        "eval_size": 64,
        "answer_format": "last_number",
        "max_prompt_tokens": 128,
    }
    config.reward = {"weights": {"number": 1.0}}
    config.rollout = {"max_live": 32, "max_len": 256, "max_tokens": 96}
    config.rl = {
        "algorithm": "grpo",
        "num_steps": 80,
        "prompts_per_step": 4,
        "group_size": 8,
        "learning_rate": 5e-6,
        "warmup_steps": 4,
        "kl_coef": 0.0,
        "pack": {"micro_batch_tokens": 1024},
    }
    config.eval = {"every": 20}
    config.checkpoint = {"every_steps": 10}
    return config
