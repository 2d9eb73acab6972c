"""GRPO on Llama-3.3-70B-Instruct: mathematics with boxed answers, responses of up to 32k tokens.

Command:   python -m launch.train --config=configs/llama3_3_70b.py --workdir=runs/llama3_3_70b \
               --config.model.path=DIR --config.task.path=train.jsonl --config.task.eval_path=test.jsonl
           DIR holds the model in Hugging Face layout; a line of the task files is {"prompt": ..., "answer": ...}.
Hardware:  64 x H100 80 GB (8 nodes). Of each GPU: 18 GB for a 64th of f32 weights, gradients and Adam, 4 GB for a 64th
           of the reference, 18 GB for an eighth of the rollout worker's bf16 copy, 22 GB for its part of a full cache.
Expect:    not run on this hardware by us. Tests build it, shard it over 8 devices from shapes and lower it for CUDA.
"""

from ml_collections import ConfigDict

from configs import qwen2_5_32b


def get_config() -> ConfigDict:
    config = qwen2_5_32b.get_config()
    changes = {
        "model": {"path": "models/llama-3.3-70b-instruct"},
        "rollout": {"num_workers": 1},  # per node: all eight GPUs hold one copy
        "mesh": {"tensor": 2},
    }
    config.update(changes)
    return config
