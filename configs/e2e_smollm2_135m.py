"""SmolLM2-135M-Instruct in few, long-tailed responses a step: what `launch.bench e2e` measures whole RL steps on.

Command:   python -m launch.bench e2e --config=configs/e2e_smollm2_135m.py --regime=law --json=e2e.json
Hardware:  2 CPU cores, a process on each; 16 GiB of memory.
Expect:    step times with speculation off, with n-grams and with all of TLT, for equal tokens and rewards.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {"path": "smollm2-135m"}
    config.task = {
        "source": "reasoning_gym",
        "dataset": "chain_sum",
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        "size": 512,
        "eval_size": 0,
        "answer_format": "last_number",
        "max_prompt_tokens": 96,
    }
    config.reward = {"weights": {"number": 1.0}, "num_workers": 1}
    config.rollout = {"max_live": 4, "max_len": 2176, "max_tokens": 2048, "min_kv": 256}
    config.rl = {
        "num_steps": 6,
        "prompts_per_step": 2,
        "group_size": 4,
        "learning_rate": 1e-6,
        "kl_coef": 0.0,
        "compute_dtype": "bfloat16",
        "pack": {"micro_batch_tokens": 1024},
    }
    # Whole weights on each process: gradients alone cross between them.
    config.mesh = {"data": -1, "fsdp": 1}
    return config
