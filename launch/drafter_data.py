"""What a drafter is trained on offline: prompts with responses, from a file, or answered here first."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from launch import setup
from launch.config import ConfigError
from launch.drafting import tracing_drafter
from launch.run_config import RunConfig
from tlt_jax import files
from tlt_jax.coordinator.driver import OnProgress
from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.drafter.buffer_file import as_bits, from_bits
from tlt_jax.drafter.features import Read, Recorded
from tlt_jax.rl import prompts as prompting
from tlt_jax.rl.tasks import Task
from tlt_jax.types import FeatureTrace, Request, SamplingParams

_KEYS = ("prompt", "messages", "response", "response_ids", "prompt_ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A prompt, and its response where there is one."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] | None = None


def read_lines(path: pathlib.Path, inputs: setup.Inputs, max_len: int) -> list[Line]:
    """Lines of a JSONL file.

    A line has `prompt` (continued as it is), `messages` (put through the chat template) or `prompt_ids`; and, or not,
    `response` (text; the model's stop id is added) or `response_ids`.

    Raises:
      ConfigError: names the file and line: not JSON, no prompt, an empty one, an unknown key, a token that the model
        does not have, a sequence longer than `max_len`.
    """
    if not path.is_file():
        raise ConfigError(f"--data: got {str(path)!r}, which is no file; expected a JSONL file of prompts")
    numbered = [(n, text) for n, text in enumerate(path.read_bytes().split(b"\n"), 1) if text.strip()]
    if not numbered:
        raise ConfigError(f"{path}: got no lines, expected one JSON object per line")
    lines = []
    for number, text in numbered:
        try:
            lines.append(_read_line(text.decode(), inputs))
            _check_line(lines[-1], inputs, max_len)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    return lines


def _read_line(text: str, inputs: setup.Inputs) -> Line:
    record = json.loads(text)
    prompts = [key for key in ("prompt", "messages", "prompt_ids") if isinstance(record, dict) and key in record]
    if len(prompts) != 1 or ("response" in record and "response_ids" in record):
        raise ValueError(
            f"got {text[:80]}, expected an object with one of 'prompt', 'messages' and 'prompt_ids', and at most one "
            "of 'response' and 'response_ids'"
        )
    if unknown := record.keys() - set(_KEYS):
        raise ValueError(f"got unknown keys {sorted(unknown)}, expected {', '.join(_KEYS)}")
    return Line(prompt_ids=_prompt_ids(record, inputs.tokenizer), response_ids=_response_ids(record, inputs))


def _prompt_ids(record: dict[str, Any], tokenizer: Any) -> tuple[int, ...]:
    if "messages" in record:
        messages = prompting.check_messages(record["messages"])
        return prompting.encode(prompting.render(messages, tokenizer), tokenizer)
    if "prompt_ids" in record:
        return _ids(record["prompt_ids"], "prompt_ids")
    if not isinstance(record["prompt"], str) or not record["prompt"]:
        raise ValueError(f"got prompt {record['prompt']!r}, expected non-empty text")
    return tuple(tokenizer.encode(record["prompt"]))


def _response_ids(record: dict[str, Any], inputs: setup.Inputs) -> tuple[int, ...] | None:
    if "response_ids" in record:
        return _ids(record["response_ids"], "response_ids")
    if "response" not in record:
        return None
    if not isinstance(record["response"], str) or not record["response"]:
        raise ValueError(f"got response {record['response']!r}, expected non-empty text")
    ids = tuple(inputs.tokenizer.encode(record["response"], add_special_tokens=False))
    return ids + inputs.model.eos_token_ids[:1]


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
        raise ValueError(f"got {name} {str(value)[:80]}, expected a non-empty list of token ids")
    return tuple(value)


def _check_line(line: Line, inputs: setup.Inputs, max_len: int) -> None:
    ids = (*line.prompt_ids, *(line.response_ids or ()))
    if min(ids) < 0 or max(ids) >= inputs.model.vocab_size:
        raise ValueError(f"got token ids {min(ids)}..{max(ids)}, expected ids in [0, {inputs.model.vocab_size})")
    if len(ids) > max_len:
        raise ValueError(
            f"got {len(ids)} tokens of prompt and response, expected at most rollout.max_len {max_len}; raise it, or "
            "leave the line out"
        )


def task_lines(task: Task, num_prompts: int) -> list[Line]:
    """Prompts of the task without responses; each once, as many as there are."""
    return [Line(prompt_ids=p.token_ids) for p in task.train[:num_prompts]]


def requests_for(lines: Sequence[Line], sampling: SamplingParams, samples: int) -> list[Request]:
    """Requests for the lines that lack a response, `samples` of each."""
    unanswered = [line for line in lines if line.response_ids is None]
    return [
        Request(request_id=i * samples + k, prompt_id=i, sample=k, prompt_ids=line.prompt_ids, sampling=sampling)
        for i, line in enumerate(unanswered)
        for k in range(samples)
    ]


class Kept:
    """Features that the engine wrote responses with, up to a number of bytes; those beyond are read again later.

    They lie beside the data: a resumed run trains on the same bits.
    """

    def __init__(self, num_requests: int, context_len: int, max_bytes: int):
        """Keeps nothing yet.

        Args:
          num_requests: to be answered.
          context_len: positions kept before the last one of a prompt.
          max_bytes: of all features together.
        """
        self.num_requests, self._context_len, self._room = num_requests, context_len, max_bytes
        self._lock = threading.Lock()
        self.traces: dict[int, FeatureTrace] = {}  # by request

    def add(self, trace: FeatureTrace) -> None:
        """Takes a trace of an engine; any thread may call."""
        start = max(trace.prompt_len - 1 - self._context_len, 0)
        at = slice(start, len(trace.token_ids) - 1)
        hidden = None if trace.hidden is None else trace.hidden[at].copy()
        cut = dataclasses.replace(trace, start=start, features=trace.features[at].copy(), hidden=hidden)
        num_bytes = cut.features.nbytes + (0 if hidden is None else hidden.nbytes)
        with self._lock:
            if num_bytes <= self._room:
                self._room -= num_bytes
                self.traces[trace.request_id] = cut

    def save(self, path: pathlib.Path, sequences: Sequence[Recorded]) -> None:
        """Writes them, as traces of the last of `sequences`, which answer the requests in order; then they are kept
        under those sequences' ids."""
        first = len(sequences) - self.num_requests
        self.traces = {first + i: dataclasses.replace(t, request_id=first + i) for i, t in self.traces.items()}
        arrays = {}
        for i, trace in self.traces.items():
            arrays[f"{i}/features"] = as_bits(trace.features)
            if trace.hidden is not None:
                arrays[f"{i}/hidden"] = as_bits(trace.hidden)
        new = path.with_name(f"{path.name}.new")
        save_file(arrays, new)
        new.replace(path)

    def load(self, path: pathlib.Path, sequences: Sequence[Recorded]) -> None:
        """Reads what `save` wrote for the same sequences; nothing where there is no file."""
        arrays = load_file(path) if path.exists() else {}
        for name, features in arrays.items():
            i, kind = int(name.split("/")[0]), name.split("/")[1]
            if kind == "features":
                sequence, hidden = sequences[i], arrays.get(f"{i}/hidden")
                self.traces[i] = FeatureTrace(
                    request_id=i,
                    token_ids=sequence.token_ids,
                    prompt_len=sequence.prompt_len,
                    features=from_bits(features),
                    hidden=None if hidden is None else from_bits(hidden),
                    start=max(sequence.prompt_len - 1 - self._context_len, 0),
                )

    def read_first(self, read: Read) -> Read:
        """`read`, but for the sequences whose features are kept."""

        def read_missing(sequences: Sequence[Recorded]) -> Iterator[FeatureTrace]:
            yield from (self.traces[s.request_id] for s in sequences if s.request_id in self.traces)
            yield from read([s for s in sequences if s.request_id not in self.traces])

        return read_missing


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Writer:
    """What answers the lines that lack a response: workers without weights yet, and what they will keep."""

    requests: list[Request]
    workers: WorkerPool
    kept: Kept


def make_writer(run: RunConfig, inputs: setup.Inputs, lines: Sequence[Line]) -> Writer:
    """Workers that keep the features a drafter of the run's config reads, whether they draft with one or not.

    Raises:
      ValueError: a request that the engines refuse.
    """
    settings = run.drafter
    requests = requests_for(lines, run.sampling, settings.warmup.samples)
    kept = Kept(len(requests), settings.batch.context_len, settings.buffer.max_bytes)
    drafting = inputs.drafting or tracing_drafter(settings, inputs.model)
    workers = setup.make_workers(run, dataclasses.replace(inputs, drafting=drafting), trace_sink=kept.add)
    for request in requests:
        workers.engines[0].check(request)
    return Writer(requests=requests, workers=workers, kept=kept)


def answer(
    lines: Sequence[Line], requests: Sequence[Request], workers: WorkerPool, on_progress: OnProgress | None
) -> list[Line]:
    """All lines with responses: those that had one, then what the engine wrote, in the order of the requests."""
    completions = workers.generate(requests, on_progress=on_progress, trace=True) if requests else []
    done = [line for line in lines if line.response_ids is not None]
    written = [Line(prompt_ids=c.prompt_ids, response_ids=tuple(c.token_ids.tolist())) for c in completions]
    return done + written


def save_lines(path: pathlib.Path, lines: Sequence[Line]) -> None:
    """As token ids, in the form that `read_lines` takes."""
    records = ({"prompt_ids": line.prompt_ids, "response_ids": line.response_ids} for line in lines)
    files.write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def as_recorded(lines: Sequence[Line]) -> list[Recorded]:
    """Sequences for the trainer, numbered in order."""
    return [
        Recorded(
            request_id=i,
            token_ids=np.asarray([*line.prompt_ids, *(line.response_ids or ())], np.int32),
            prompt_len=len(line.prompt_ids),
        )
        for i, line in enumerate(lines)
    ]
