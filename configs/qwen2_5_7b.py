"""GRPO on Qwen2.5-7B: mathematics with boxed answers, responses of up to 32k tokens.

Command:   python -m launch.train --config=configs/qwen2_5_7b.py --workdir=runs/qwen2_5_7b \
               --config.model.path=DIR --config.task.path=train.jsonl --config.task.eval_path=test.jsonl
           DIR holds the model in Hugging Face layout; a line of the task files is {"prompt": ..., "answer": ...}.
Hardware:  8 x H100 80 GB. Of each GPU: 15 GB for an eighth of f32 weights, gradients and Adam, 4 GB for an eighth of
           the reference, 15 GB for the rollout worker's bf16 copy, 30 GB for a full cache, the rest for activations.
Expect:    not run on this hardware by us. Tests build it, shard it over 8 devices from shapes and lower it for CUDA.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {"path": "models/qwen2.5-7b", "dtype": "bfloat16"}
    config.task = {
        "source": "jsonl",
        "path": "data/math_train.jsonl",
        "eval_path": "data/math_test.jsonl",
        "answer_format": "boxed",
        "prompt_template": "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "max_prompt_tokens": 1024,
    }
    config.reward = {"weights": {"math": 1.0}}
    config.rollout = {
        "num_workers": 8,
        "max_live": 16,
        "max_len": 32768 + 1024,
        "max_tokens": 32768,
        "temperature": 0.9,
        "prefill_chunk": 1024,
    }
    config.rl = {
        "algorithm": "grpo",
        "kl_coef": 0.001,
        "num_steps": 500,
        "prompts_per_step": 64,
        "group_size": 8,
        "learning_rate": 1e-6,
        "compute_dtype": "bfloat16",
        "head_tokens": 16384,
        "pack": {"micro_batch_tokens": 8 * 33792},
    }
    config.eval = {"every": 20, "temperature": 0.6, "num_samples": 4}
    config.checkpoint = {"every_steps": 20}
    return config
