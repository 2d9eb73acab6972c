"""A tiny Hugging Face model directory with a character tokenizer, a task, a reward and a run over them.

For tests that go through a whole run: everything is small, and programs are shared between the runs of one process.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain  # noqa: F401  # defines flags on import: not to happen while `run_command` saves and restores them
import jax
import numpy as np
import pyarrow.parquet
import pytest
import tokenizers
import transformers
from absl import flags
from absl.testing import flagsaver

from launch import cli, run_config, setup, train
from tests.rollout.tiny import lively
from tlt_jax.checkpoint import CheckpointStore
from tlt_jax.metrics import read_jsonl
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.hf_export import save_hf
from tlt_jax.models.transformer import init_params
from tlt_jax.rl.loop import TrainLoop
from tlt_jax.rl.rewards import RewardItem, RewardResult
from tlt_jax.rl.update import make_learner
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.rollout.executables import ExecutablePool

ONE_DEVICE = "--xla_backend_optimization_level=0"  # `XLA_FLAGS` of processes with the machine's own devices
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-=.,:?!\n"
TOKENS = ["<pad>", "<s>", "</s>", "<end>", *CHARACTERS]
CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
MODEL = ModelConfig(
    vocab_size=56,
    num_valid_tokens=len(TOKENS),
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    tie_embeddings=True,
    max_position_embeddings=256,
    eos_token_ids=(2, 3),
    bos_token_id=1,
    pad_token_id=0,
    model_type="qwen3",
    qk_norm=True,
)

# Rewards by import path, for reward processes: `tiny_rewards:NAME`.
REWARDS = """
def digits(text, reference):
    return sum(c.isdigit() for c in text) / max(len(text), 1)

def one(text, reference):
    return 1.0

def even_prompts(text, reference):
    # Responses to every other prompt all score alike.
    return digits(text, reference) if int(reference["answer"]) % 2 else 0.5

def broken(text, reference):
    if any(c in "aeiou" for c in text):
        raise ValueError("a vowel")
    return 1.0
"""


def write_tokenizer(directory: pathlib.Path) -> None:
    model = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[])
    fast = tokenizers.Tokenizer(model)
    fast.decoder = tokenizers.decoders.Fuse()
    special = ("<pad>", "<s>", "</s>", "<end>")
    fast.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)


def write_model(directory: pathlib.Path, config: ModelConfig = MODEL, scale: float = 1.0) -> pathlib.Path:
    """The model directory: random weights whose next-token laws are uneven and depend on the whole prefix."""
    params = lively(init_params(config, jax.random.key(3)))
    save_hf(directory, config, jax.tree.map(lambda x: x * scale if x.ndim == 2 else x, params))
    write_tokenizer(directory)
    return directory


def write_task(path: pathlib.Path, count: int = 13) -> pathlib.Path:
    """Prompts of equal length, so that a run needs few shapes."""
    records = [{"prompt": f"{n:02d} plus 1?", "answer": str(n + 1)} for n in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_rewards(directory: pathlib.Path) -> pathlib.Path:
    (directory / "tiny_rewards.py").write_text(REWARDS)
    return directory


def sections(root: pathlib.Path, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A run's sections over the files in `root` (`make_files`), with `section={key: value}` changed."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(root / "model")},
        "task": {"path": str(root / "task.jsonl"), "eval_size": 3, "max_prompt_tokens": 32},
        "reward": {"weights": {"tiny_rewards:digits": 1.0}, "num_workers": 1},
        "rollout": {
            "max_live": 2,
            "max_len": 64,
            "min_kv": 64,
            "max_tokens": 12,
            "rounds_per_dispatch": 4,
            "prefill_rows": 1,
        },
        "rl": {
            "num_steps": 4,
            "prompts_per_step": 2,
            "group_size": 4,
            "learning_rate": 1e-3,
            "kl_coef": 0.0,
            "head_tokens": 64,
            "pack": {"micro_batch_tokens": 128, "min_width": 64},
        },
        "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
        "checkpoint": {"every_steps": 1, "num_keep": 2},
    }
    for name, section in changes.items():
        base[name] = base.get(name, {}) | section
    return base


def make_files(root: pathlib.Path) -> pathlib.Path:
    """Model, task and rewards in one directory, which must be on PYTHONPATH for the rewards."""
    write_model(root / "model")
    write_task(root / "task.jsonl")
    write_rewards(root)
    return root


def write_config(path: pathlib.Path, config: dict[str, dict[str, Any]]) -> pathlib.Path:
    path.write_text(f"import ml_collections\n\ndef get_config():\n    return ml_collections.ConfigDict({config!r})\n")
    return path


class Quiet:
    """A reporter that keeps what it is told."""

    def __init__(self):
        self.phases: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self.live: list[int] = []

    def phase(self, step, name):
        self.phases.append((step, name))

    def progress(self, progress):
        self.live.append(progress.live)

    def done(self, step, metrics):
        self.phases.append((step, "done"))

    def note(self, text):
        self.notes.append(text)

    def close(self):
        self.phases.append((0, "closed"))


class LocalRewards:
    """Stands in for a pool of processes: scores at once; `score` takes (text, reference)."""

    def __init__(self, score: Callable[[str, Mapping[str, Any]], float]):
        self._score = score

    def submit(self, items: Sequence[RewardItem]) -> concurrent.futures.Future[RewardResult]:
        future: concurrent.futures.Future[RewardResult] = concurrent.futures.Future()
        scores = np.array([self._score(item.text, item.reference) for item in items], np.float32)
        future.set_result(RewardResult(scores=scores, status=("ok",) * len(items), messages=(), seconds=0.0))
        return future


shared_learner = functools.cache(make_learner)
shared_pool = functools.cache(lambda *_key: ExecutablePool())


class SharingEngine(RolloutEngine):
    """An engine whose compiled programs serve every engine of the same model and devices."""

    def __init__(self, model, config, **kwargs):
        pool = shared_pool(model, config.cache_dtype, tuple(kwargs["mesh"].devices.flat))
        super().__init__(model, config, pool=pool, **kwargs)


def share_programs(patch, num_devices: int = 1) -> None:
    """Commands run in this process see the first devices alone, and compile what no test before them has."""
    devices = jax.devices()[:num_devices]
    patch.setattr(jax, "devices", lambda: list(devices))
    patch.setattr(jax, "local_devices", lambda: list(devices))
    patch.setattr(setup, "RolloutEngine", SharingEngine)


def run_command(capfd, main: Callable, *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command with these arguments, in this process."""
    code = 0
    with pytest.MonkeyPatch.context() as patch, flagsaver.flagsaver():
        patch.setattr(sys, "argv", ["command", *map(str, argv)])
        patch.setattr(cli, "keep_compiled_programs", lambda: None)  # this process goes on with other tests
        flags.FLAGS.unparse_flags()
        capfd.readouterr()
        try:
            cli.run(main)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    out, err = capfd.readouterr()
    return code, out, err


def make_loop(
    config: dict[str, dict[str, Any]],
    workdir: pathlib.Path,
    rewards: Any,
    num_devices: int = 1,
) -> TrainLoop:
    """The loop that `launch.train` would run, on the first devices; compiled programs are shared between loops."""
    run = run_config.make_run_config(config)
    devices = jax.devices()[:num_devices]
    inputs = setup.read_inputs(run)
    parts = train.Parts(
        run=run, inputs=inputs, task=setup.load_task(run, inputs), rewards=rewards, workdir=workdir, reporter=Quiet()
    )
    store = CheckpointStore(workdir / "checkpoints", run.checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "RolloutEngine", SharingEngine)
        return train.make_loop(parts, store, devices, make_learner=shared_learner)


def run_loop(config, workdir, rewards, num_devices: int = 1) -> TrainLoop:
    """Trains to `rl.num_steps` from what is in `workdir`, and closes everything."""
    loop = make_loop(config, workdir, rewards, num_devices)
    try:
        loop.run()
    finally:
        loop.close()
    return loop


def read_rollouts(workdir: pathlib.Path) -> dict[int, list[dict[str, Any]]]:
    """Rows of the Parquet files by step."""
    paths = sorted((workdir / "rollouts").glob("*.parquet"))
    return {int(p.stem.removeprefix("step_")): pyarrow.parquet.read_table(p).to_pylist() for p in paths}


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return read_jsonl(workdir / "metrics.jsonl")
