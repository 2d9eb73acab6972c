"""The rollout engine alone: `python -m launch.generate --config=configs/X.py --prompts=F.jsonl --out=F.jsonl`.

Each input line is `{"prompt": text}` or `{"messages": [...]}`; messages go through the tokenizer's chat template, a
prompt is continued as it is. A line may also hold `max_tokens`, `temperature`, `top_k`, `top_p`, `min_p` and `stop` of
its own. Output lines are in input order: `text, token_ids, logprobs, finish_reason, rounds, accept_len`.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import tqdm
from absl import flags

from launch import cli, setup
from launch.config import ConfigError, build
from launch.run_config import RunConfig
from tlt_jax import files
from tlt_jax.rl import prompts as prompting
from tlt_jax.types import Completion, Request, SamplingParams

_PROMPTS = flags.DEFINE_string("prompts", "", "JSONL file of prompts.")
_OUT = flags.DEFINE_string("out", "", "JSONL file to write.")
_SAMPLES = flags.DEFINE_integer("samples", 1, "Responses per prompt; output lines of a prompt are next to each other.")

_OWN_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "stop")


def main() -> dict[str, Any]:
    run = cli.read_run_config()
    with cli.checking_input():
        _check_flags()
        inputs = setup.read_inputs(run)
        workers = setup.make_workers(run, inputs)
        check = workers.engines[0].check
        requests = read_requests(pathlib.Path(_PROMPTS.value), run, inputs, _SAMPLES.value, check)
        setup.load_rollout_weights(run, inputs, workers)
    start_s = time.perf_counter()
    with tqdm.tqdm(total=len(requests), unit="resp", disable=not sys.stderr.isatty()) as bar:

        def on_progress(progress) -> None:
            bar.n = progress.done
            bar.set_postfix_str(f"live {progress.live}, {progress.tokens} tokens")

        completions = workers.generate(requests, on_progress=on_progress)
    seconds = time.perf_counter() - start_s
    lines = [json.dumps(_row(c, inputs.decode_text)) + "\n" for c in completions]
    files.write_text(pathlib.Path(_OUT.value), "".join(lines))
    num_tokens = sum(len(c.token_ids) for c in completions)
    compile_s = sum(e.pool.stats.compile_s for e in workers.engines)
    return {
        "out": _OUT.value,
        "responses": len(completions),
        "tokens": num_tokens,
        "seconds": seconds,
        "compile_s": compile_s,
        "tokens_per_s": num_tokens / max(seconds - compile_s, 1e-9),
    }


def _check_flags() -> None:
    for name, value in (("prompts", _PROMPTS.value), ("out", _OUT.value)):
        if not value:
            raise ConfigError(f"--{name}: got none, expected a JSONL file")
    if not pathlib.Path(_PROMPTS.value).is_file():
        raise ConfigError(f"--prompts: got {_PROMPTS.value!r}, which is no file; expected a JSONL file of prompts")
    if pathlib.Path(_OUT.value).is_dir():
        raise ConfigError(f"--out: got {_OUT.value!r}, which is a directory; expected a file to write")
    if _SAMPLES.value < 1:
        raise ConfigError(f"--samples: got {_SAMPLES.value}, expected >= 1")


def read_requests(
    path: pathlib.Path, run: RunConfig, inputs: setup.Inputs, num_samples: int, check: Callable[[Request], None]
) -> list[Request]:
    """One request per line and sample; `check` raises ValueError for one that cannot be generated.

    Raises:
      ConfigError: names the file and line: not JSON, no prompt, an empty one, one too long, a bad field.
    """
    requests = []
    # Lines end at a newline alone: a JSON string may hold other characters that `splitlines` breaks at.
    lines = [(n, line) for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path}: got no prompts, expected one JSON object per line")
    for i, (number, line) in enumerate(lines):
        try:
            token_ids, sampling = _read_line(line.decode(), run.sampling, inputs.tokenizer)
            samples = [
                Request(request_id=i * num_samples + k, prompt_id=i, sample=k, prompt_ids=token_ids, sampling=sampling)
                for k in range(num_samples)
            ]
            check(samples[0])
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        requests += samples
    return requests


def _read_line(line: str, sampling: SamplingParams, tokenizer: Any) -> tuple[tuple[int, ...], SamplingParams]:
    record = json.loads(line)
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise ValueError(f"got {line[:80]}, expected an object with either 'prompt' or 'messages'")
    unknown = record.keys() - {"prompt", "messages", *_OWN_SAMPLING}
    if unknown:
        raise ValueError(f"got unknown keys {sorted(unknown)}, expected prompt or messages, {', '.join(_OWN_SAMPLING)}")
    own = {k: record[k] for k in _OWN_SAMPLING if k in record}
    if isinstance(own.get("stop"), str):
        own["stop"] = [own["stop"]]
    (sampling,) = build(own, "sampling", sampling)
    if "messages" in record:
        messages = prompting.check_messages(record["messages"])
        return prompting.encode(prompting.render(messages, tokenizer), tokenizer), sampling
    if not isinstance(record["prompt"], str) or not record["prompt"]:
        raise ValueError(f"got prompt {record['prompt']!r}, expected non-empty text")
    return tuple(tokenizer.encode(record["prompt"])), sampling


def _row(completion: Completion, decode_text: setup.DecodeText) -> dict[str, Any]:
    return {
        "text": decode_text(completion.token_ids.tolist()),
        "token_ids": completion.token_ids.tolist(),
        "logprobs": [round(float(x), 6) for x in completion.logprobs],
        "finish_reason": completion.finish_reason,
        "rounds": completion.rounds,
        "accept_len": completion.accept_len,
    }


if __name__ == "__main__":
    cli.run(main)
