"""`launch.bench rollout` and `launch.bench train`: ours against peers on the same weights, requests and threads.

Ours runs before and after the peers, in the same run, and the two medians are averaged by their middle: the ratio is
not to hang on which of them met a busier machine. Compilation is outside every figure, in `compile_s`.
"""

from __future__ import annotations

import pathlib
import random
import statistics
import tempfile
from typing import Any

from benchmarks import machine, ours
from benchmarks.peers import api
from benchmarks.peers.job import RolloutJob, TrainJob, scenario_requests
from benchmarks.peers.make_tiny import TinySpec, write_tiny
from tlt_jax.models.hf import load_config, num_params

ROLLOUT_PEERS = ("tunix", "transformers", "llama_cpp", "vllm")
TRAIN_PEERS = ("transformers", "tunix", "trl")


def rollout(scenario: str, model: str, peers: list[str], repeats: int, threads: int) -> dict[str, Any]:
    """One scenario: `fixed`, `longtail`, or `decodeB`, B requests of 64 new tokens on prompts of 32.

    Args:
      scenario: name.
      model: Hugging Face directory, or "tiny" for the 6M-parameter Qwen2 of the peer table.
      peers: names from `benchmarks.peers.api`; those not installed are left out and listed.
      repeats: timed calls of each part.
      threads: CPUs of every process.
    """
    with tempfile.TemporaryDirectory() as folder:
        model_dir = _model_dir(model, folder)
        config = load_config(model_dir)
        num_valid = config.num_valid_tokens or config.vocab_size
        if scenario.startswith("decode"):
            requests = _decode_requests(int(scenario.removeprefix("decode")), num_valid)
        else:
            requests = scenario_requests(scenario, vocab_size=num_valid)
        fields = {"model_dir": model_dir, "threads": threads, "repeats": repeats, "warmup": 1, **requests}
        result = _compare("rollout", RolloutJob(**fields), {"kind": "rollout", **fields}, peers)
        if scenario == "decode1":
            result |= _against_bandwidth(result["ours_tok_s"], 4 * num_params(config))
    return {"scenario": scenario, "model": model if model == "tiny" else pathlib.Path(model).name} | result


def train(model: str, peers: list[str], repeats: int, threads: int, rows: int, length: int) -> dict[str, Any]:
    """One GRPO update on `rows` rows of 64 prompt tokens and `length - 64` response tokens."""
    with tempfile.TemporaryDirectory() as folder:
        model_dir = _model_dir(model, folder)
        config = load_config(model_dir)
        rng = random.Random(0)
        num_valid = config.num_valid_tokens or config.vocab_size

        def draw(n: int) -> list[list[int]]:
            return [[rng.randrange(1, num_valid) for _ in range(n)] for _ in range(rows)]

        fields = {
            "model_dir": model_dir,
            "threads": threads,
            "repeats": repeats,
            "prompts": draw(64),
            "responses": draw(length - 64),
            "advantages": [rng.gauss(0, 1) for _ in range(rows)],
            "micro_batch": min(4, rows),
            "remat": True,
        }
        result = _compare("train", TrainJob(**fields), {"kind": "train", **fields}, peers)
    return {"model": model if model == "tiny" else pathlib.Path(model).name, "rows": rows, "length": length} | result


def _model_dir(model: str, folder: str) -> str:
    if model != "tiny":
        return model
    write_tiny(folder, TinySpec())
    return folder


def _decode_requests(batch_size: int, num_valid: int) -> dict[str, Any]:
    rng = random.Random(1)
    prompts = [[rng.randrange(1, num_valid) for _ in range(32)] for _ in range(batch_size)]
    return {"prompts": prompts, "max_new_tokens": [64] * batch_size, "batch_size": batch_size, "kv_tokens": 128}


def _compare(kind: str, job: Any, fields: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    run = ours.rollout if kind == "rollout" else ours.train
    first = run(job)
    found, missing = {}, []
    for peer in peers:
        if api.available(peer):
            found[peer] = api.run_peer(peer, fields, timeout_s=1800)
        else:
            missing.append(peer)
    second = run(job)
    walls = first["walls_s"] + second["walls_s"]
    num_tokens = first["useful_tokens"] if kind == "rollout" else job.num_tokens
    ours_tok_s = num_tokens / statistics.median(walls)
    kept = ("tok_s", "tok_per_cpu_s", "compile_s", "utilisation", "versions", "settings", "first_step")
    result = {
        "ours_tok_s": ours_tok_s,
        "ours_walls_s": walls,
        "peers": {name: r["tok_s"] for name, r in found.items()},
        "ratios": {name: ours_tok_s / r["tok_s"] for name, r in found.items()},
        "compile_s": first["compile_s"],
        "peer_details": {name: {k: r[k] for k in kept if k in r} for name, r in found.items()},
        "peers_not_installed": missing,
        "machine": machine.describe(),
    }
    if kind == "rollout":
        result |= {
            "utilisation": first["utilisation"],
            "ours_tok_per_cpu_s": first["tok_per_cpu_s"],
            "compiles_after_warmup": first["compiles_after_warmup"],
            "repeatable": first["token_ids"] == second["token_ids"],
        }
    else:
        result["ours_first_step"] = first["first_step"]
    return result


def _against_bandwidth(tok_s: float, weight_bytes: int) -> dict[str, float]:
    """How far one decoded token is from reading every weight once at the memory's speed."""
    bytes_per_s = machine.read_bandwidth()
    return {
        "weight_bytes": weight_bytes,
        "read_gb_s": bytes_per_s / 1e9,
        "ms_per_token": 1e3 / tok_s,
        "ideal_ms_per_token": 1e3 * weight_bytes / bytes_per_s,
        "times_ideal": bytes_per_s / tok_s / weight_bytes,
    }
