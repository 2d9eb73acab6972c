"""GRPO on Qwen2.5-32B: mathematics with boxed answers, responses of up to 32k tokens.

Command:   python -m launch.train --config=configs/qwen2_5_32b.py --workdir=runs/qwen2_5_32b \
               --config.model.path=DIR --config.task.path=train.jsonl --config.task.eval_path=test.jsonl
           DIR holds the model in Hugging Face layout; a line of the task files is {"prompt": ..., "answer": ...}.
Hardware:  64 x H100 80 GB (8 nodes). Of each GPU: 8 GB for a 64th of f32 weights, gradients and Adam, 2 GB for a 64th
           of the reference, 16 GB for a quarter of the rollout worker's bf16 copy, 34 GB for its part of a full cache.
Expect:    not run on this hardware by us. Tests build it, shard it over 8 devices from shapes and lower it for CUDA.
"""

from ml_collections import ConfigDict

from configs import qwen2_5_7b


def get_config() -> ConfigDict:
    config = qwen2_5_7b.get_config()
    changes = {
        "model": {"path": "models/qwen2.5-32b"},
        "rollout": {"num_workers": 2},  # per node: four GPUs, tensor-parallel, hold one copy
        "rl": {"prompts_per_step": 256, "head_tokens": 64 * 2048, "pack": {"micro_batch_tokens": 64 * 33792}},
    }
    config.update(changes)
    return config
