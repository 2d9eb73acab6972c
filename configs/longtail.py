"""Long-tailed rollouts on a small machine: two prompts a step, responses as long as a reasoning model's, in proportion.

Lengths follow the output lengths of a reasoning model in production, scaled so that the longest possible response has
`rollout.max_tokens` tokens; the model's own end of a response is ignored. As in training at scale, most of a step is
the rollout, and most of the rollout is waiting for one response. What the model writes past its answer has no worth:
this is for measuring.

Command:   python -m launch.train_drafter --config=configs/longtail.py --workdir=runs/longtail_drafter \
               --config.rollout.max_tokens=512 --config.rollout.ignore_eos=true
           python -m launch.bench e2e --config=configs/longtail.py --regime=law \
               --variants=plain,ngram,tlt_warm --warm=runs/longtail_drafter
Hardware:  2 CPU cores, a process on each; 16 GiB of memory.
Expect:    step times by variant, equal tokens and rewards, and the share of a plain step that its rollout takes.
"""

from ml_collections import ConfigDict

from configs import quickstart, quickstart_drafter

# Enough of them that what follows a response is more of the same: text as regular as long reasoning is.
SUMS = ((4, 3), (2, 9), (7, 8), (6, 5), (9, 1), (3, 3))
EXAMPLES = tuple((f"{quickstart.ASK} {a} + {b} =", f"{a} + {b} = {a + b}. The answer is {a + b}.") for a, b in SUMS)


def get_config() -> ConfigDict:
    config = quickstart_drafter.get_config()
    config.update(
        {
            "task": {
                "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
                "few_shot": EXAMPLES,
                "max_prompt_tokens": 320,
                "eval_size": 0,
            },
            "reward": {"num_workers": 1},
            "rollout": {"max_live": 4, "max_len": 8192, "max_tokens": 7800, "temperature": 0.9, "min_kv": 512},
            "rl": {
                "num_steps": 6,
                "prompts_per_step": 2,
                "group_size": 2,
                "length_law": "reasoning",
                "compute_dtype": "bfloat16",
                "pack": {"micro_batch_tokens": 2048},
            },
            # Whole weights on each process: gradients alone cross between them.
            "mesh": {"data": -1, "fsdp": 1},
            "drafter": {"warmup": {"num_prompts": 32, "samples": 4}, "optim": {"learning_rate": 1e-3}},
        }
    )
    return config
