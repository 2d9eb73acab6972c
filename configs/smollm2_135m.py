"""GRPO on SmolLM2-135M-Instruct: sums and differences of two one-digit numbers, answers after two worked examples.

Command:   python -m launch.train --config=configs/smollm2_135m.py --workdir=runs/smollm2_135m
Hardware:  2 CPU cores and 8 GiB of memory, or any GPU.
Expect:    held-out greedy accuracy and mean reward rise within the first 50 steps; a recorded run is in
           benchmarks/results/.
"""

from ml_collections import ConfigDict

ASK = "State the final answer to the following arithmetic problem:"


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {"path": "smollm2-135m"}
    config.task = {
        "source": "reasoning_gym",
        "dataset": "chain_sum",
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "few_shot": (
            (f"{ASK} 4 + 3 =", "4 + 3 = 7. The answer is 7."),
            (f"{ASK} 2 - 8 =", "2 - 8 = -6. The answer is -6."),
        ),
        "size": 2048,
        "eval_size": 64,
        "answer_format": "last_number",
        "max_prompt_tokens": 192,
    }
    config.reward = {"weights": {"number": 1.0}}
    config.rollout = {"max_live": 32, "max_len": 256, "max_tokens": 48}
    config.rl = {
        "num_steps": 100,
        "prompts_per_step": 6,
        "group_size": 8,
        "learning_rate": 5e-6,
        "warmup_steps": 2,
        "kl_coef": 0.0,
        "compute_dtype": "bfloat16",
        "pack": {"micro_batch_tokens": 1024},
    }
    config.eval = {"every": 10}
    config.checkpoint = {"every_steps": 20, "best_metric": "eval/mean_at_k"}
    return config
