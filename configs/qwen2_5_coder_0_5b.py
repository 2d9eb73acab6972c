"""GRPO on Qwen2.5-Coder-0.5B-Instruct: sums of three and four numbers, reasoned out, the answer in a tag.

Command:   python -m launch.train --config=configs/qwen2_5_coder_0_5b.py --workdir=runs/qwen_coder \
               --config.model.path=DIR
           DIR holds the model in Hugging Face layout.
Hardware:  2 CPU cores, 20 GiB of memory; or one GPU with 16 GB (then add --config.model.dtype=bfloat16).
Expect:    about four of ten answers are right at the start. A step takes minutes on 2 cores, seconds on a GPU.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {"path": "models/qwen2.5-coder-0.5b-instruct"}
    config.task = {
        "source": "reasoning_gym",
        "dataset": "chain_sum",
        "params": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2},
        "size": 4096,
        "eval_size": 64,
        "answer_format": "answer_tag",
        "prompt_template": "{prompt}\nThink step by step. End with the number alone in <answer> and </answer>.",
        "max_prompt_tokens": 192,
    }
    config.reward = {"weights": {"number": 1.0}}
    config.rollout = {"max_live": 16, "max_len": 448, "max_tokens": 256, "stop": ("</answer>",)}
    config.rl = {
        "algorithm": "dr_grpo",
        "num_steps": 100,
        "prompts_per_step": 4,
        "group_size": 8,
        "learning_rate": 2e-6,
        "warmup_steps": 4,
        "pack": {"micro_batch_tokens": 2048},
    }
    config.eval = {"every": 20, "max_tokens": 256}
    config.checkpoint = {"every_steps": 20, "num_keep": 1}
    return config
