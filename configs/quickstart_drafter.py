"""The quickstart's task with a drafter for it: EAGLE-3 form, 512 ids, good for a chain of five at temperature 1.

Command:   python -m launch.train_drafter --config=configs/quickstart_drafter.py --workdir=runs/drafter
           python -m launch.train --config=configs/quickstart_drafter.py --config.drafter.enabled=true \
               --config.drafter.path=runs/drafter
Hardware:  2 CPU cores, 6 GiB of memory.
Expect:    training: 2,000 responses, then 480 optimizer steps, some ten minutes in all; the curve of held-out accept
           length is in benchmarks/results/. The run: the tokens of the quickstart, in fewer rounds.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.drafter = {
        "form": "eagle3",
        "preset": "eagle3",
        "draft_vocab_size": 512,
        "loss": {"logit_loss": "log_overlap", "num_steps": 4, "step_decay": 1.0},
        "batch": {"row_len": 256, "num_rows": 2, "context_len": 8},
        "warmup": {
            "num_prompts": 200,
            "samples": 10,
            "num_steps": 480,
            "optim": {"total_steps": 480, "learning_rate": 1e-3, "warmup_steps": 20, "feature_noise": 0.2},
        },
    }
    return config
