"""Quickstart: GRPO on SmolLM2-135M-Instruct with two-term sums, end to end on a laptop-class CPU.

Command:   make quickstart
           python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart
Hardware:  2 CPU cores, 6 GiB of memory.
Expect:    three RL steps, a line each. Rewards move little in three steps; this shows that everything runs.
"""

from ml_collections import ConfigDict

ASK = "State the final answer to the following arithmetic problem:"
EXAMPLES = (
    (f"{ASK} 14 + 3 =", "14 + 3 = 17. The answer is 17."),
    (f"{ASK} 29 - 15 =", "29 - 15 = 14. The answer is 14."),
)


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {"path": "smollm2-135m"}
    config.task = {
        "source": "reasoning_gym",
        "dataset": "chain_sum",
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        "few_shot": EXAMPLES,
        "size": 512,
        "eval_size": 16,
        "answer_format": "last_number",
        "max_prompt_tokens": 192,
    }
    config.reward = {"weights": {"number": 1.0}}
    config.rollout = {"max_live": 16, "max_len": 256, "max_tokens": 48}
    config.rl = {
        "num_steps": 3,
        "prompts_per_step": 4,
        "group_size": 4,
        "learning_rate": 5e-6,
        "kl_coef": 0.0,
        "pack": {"micro_batch_tokens": 512},
    }
    config.checkpoint = {"every_steps": 0}
    return config
