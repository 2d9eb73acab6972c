"""GRPO on DeepSeek-R1-Distill-Qwen-7B, which thinks at length before it answers.

Command:   python -m launch.train --config=configs/r1_distill_qwen_7b.py --workdir=runs/r1_distill_qwen_7b \
               --config.model.path=DIR --config.task.path=train.jsonl --config.task.eval_path=test.jsonl
           DIR holds the model in Hugging Face layout; a line of the task files is {"prompt": ..., "answer": ...}.
Hardware:  8 x H100 80 GB, as configs/qwen2_5_7b.py.
Expect:    not run on this hardware by us. Responses are several thousand tokens from the first step on, with a tail to
           the cap; an answer inside unfinished thinking earns nothing.
"""

from ml_collections import ConfigDict

from configs import qwen2_5_7b


def get_config() -> ConfigDict:
    config = qwen2_5_7b.get_config()
    config.update({"model": {"path": "models/deepseek-r1-distill-qwen-7b"}})
    return config
