"""The job that every peer is given, and the scenarios that jobs are made of.

A job is one JSON object. `kind` says which: `rollout` (generate tokens for prompts given as token ids) or `train` (one
optimizer step on finished responses). Peers read the same file, load the same Hugging Face directory and print the same
result fields (`harness.py`), so figures of one run can be set side by side.

Invariants: standard library only (this module runs in our environment and in every peer's); a request's length is
part of the job, so every peer generates exactly the same number of useful tokens, whatever its sampler draws.
"""

import dataclasses
import difflib
import json
import math
import os
import random
from typing import Any

DTYPES = ("float32", "bfloat16")


class JobError(ValueError):
    """A job that cannot be taken: the message says what was got, what was expected and what to change."""


def _require(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise JobError(f"job field '{name}': got {got!r}, expected {expected}; correct it in the job")


def _require_token_rows(name: str, rows: Any) -> None:
    ok = (
        isinstance(rows, list)
        and bool(rows)
        and all(
            isinstance(row, list) and row and all(type(token) is int and token >= 0 for token in row) for row in rows
        )
    )
    got = f"{len(rows)} rows" if isinstance(rows, list) else rows
    _require(ok, name, got, "a non-empty list of non-empty lists of token ids (integers >= 0)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonJob:
    """What both kinds share."""

    kind: str
    model_dir: str  # Hugging Face directory: config.json and safetensors
    dtype: str = "float32"  # weights and activations
    temperature: float = 1.0  # rollout: 0 is greedy
    threads: int = 2  # CPUs the process may use; every pool in it is set to this
    seed: int = 0
    warmup: int = 1  # calls before the clock starts; they carry tracing and compilation
    repeats: int = 5
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # a peer's own switches, listed in its runner

    def _check_common(self) -> None:
        is_model = isinstance(self.model_dir, str) and os.path.isfile(os.path.join(self.model_dir, "config.json"))
        _require(is_model, "model_dir", self.model_dir, "a directory with config.json and safetensors")
        _require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {DTYPES}")
        _require(type(self.threads) is int and self.threads >= 1, "threads", self.threads, "an integer >= 1")
        _require(type(self.warmup) is int and self.warmup >= 1, "warmup", self.warmup, "an integer >= 1")
        _require(type(self.repeats) is int and self.repeats >= 1, "repeats", self.repeats, "an integer >= 1")
        _require(type(self.seed) is int and self.seed >= 0, "seed", self.seed, "an integer >= 0")
        _require(isinstance(self.options, dict), "options", self.options, "an object")
        is_number = type(self.temperature) in (int, float) and self.temperature >= 0
        _require(is_number, "temperature", self.temperature, "a number >= 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutJob(CommonJob):
    """Generate `max_new_tokens[i]` tokens for `prompts[i]`, at most `batch_size` requests live at a time.

    With `stop_token_ids` empty (the scenarios below) no token ends a response early. Otherwise a response also ends
    with the first of those ids, which counts as generated.
    """

    kind: str = "rollout"
    prompts: list[list[int]]
    max_new_tokens: list[int]
    batch_size: int
    stop_token_ids: list[int] = dataclasses.field(default_factory=list)
    kv_tokens: int = 0  # cache positions per sequence; 0: the longest prompt plus the longest response
    return_tokens: bool = False  # put the generated ids of the last repeat into the result

    def __post_init__(self) -> None:
        self._check_common()
        _require(self.kind == "rollout", "kind", self.kind, "'rollout'")
        _require_token_rows("prompts", self.prompts)
        lengths = self.max_new_tokens
        ok = isinstance(lengths, list) and all(type(n) is int and n >= 1 for n in lengths)
        _require(ok, "max_new_tokens", lengths, "a list of integers >= 1, one per prompt")
        expected = f"one per prompt ({len(self.prompts)})"
        _require(len(lengths) == len(self.prompts), "max_new_tokens", f"{len(lengths)} lengths", expected)
        ok = type(self.batch_size) is int and self.batch_size >= 1
        _require(ok, "batch_size", self.batch_size, "an integer >= 1")
        needed = max(map(len, self.prompts)) + max(lengths)
        ok = type(self.kv_tokens) is int and (self.kv_tokens == 0 or self.kv_tokens >= needed)
        _require(ok, "kv_tokens", self.kv_tokens, f"0 or at least {needed}, longest prompt + longest response")

    @property
    def kv_capacity(self) -> int:
        return self.kv_tokens or max(map(len, self.prompts)) + max(self.max_new_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob(CommonJob):
    """One GRPO step on finished responses: a log-prob forward, then forward, backward, clip and AdamW.

    Loss: the clipped surrogate, token-mean over the response tokens of the whole batch, no KL term. Without
    `behaviour_logprobs` the ratio's denominator is the policy itself (on-policy, ratio 1).
    """

    kind: str = "train"
    prompts: list[list[int]]
    responses: list[list[int]]
    advantages: list[float]  # one per row
    behaviour_logprobs: list[list[float]] = dataclasses.field(default_factory=list)  # one per response token, or empty
    micro_batch: int  # rows per forward and backward; gradients are accumulated over the batch
    learning_rate: float = 1e-6
    clip: float = 0.2
    max_grad_norm: float = 1.0
    remat: bool = False  # recompute activations in the backward pass

    def __post_init__(self) -> None:
        self._check_common()
        _require(self.kind == "train", "kind", self.kind, "'train'")
        _require(self.temperature > 0, "temperature", self.temperature, "a number > 0 (the sampling temperature)")
        _require_token_rows("prompts", self.prompts)
        _require_token_rows("responses", self.responses)
        num_rows = len(self.prompts)
        _require(len(self.responses) == num_rows, "responses", f"{len(self.responses)} rows", f"{num_rows}, as prompts")
        _require(len(self.advantages) == num_rows, "advantages", f"{len(self.advantages)}", f"{num_rows}, as prompts")
        behaviour = [len(row) for row in self.behaviour_logprobs]
        ok = not behaviour or behaviour == [len(row) for row in self.responses]
        _require(ok, "behaviour_logprobs", f"lengths {behaviour}", "empty, or one per response token")
        ok = type(self.micro_batch) is int and self.micro_batch >= 1 and num_rows % self.micro_batch == 0
        _require(ok, "micro_batch", self.micro_batch, f"a divisor of the {num_rows} rows")

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens, padding excluded: what `tok_s` of a train job counts."""
        return sum(map(len, self.prompts)) + sum(map(len, self.responses))


Job = RolloutJob | TrainJob
_KINDS: dict[str, type[RolloutJob] | type[TrainJob]] = {"rollout": RolloutJob, "train": TrainJob}


def job_from_dict(fields: dict[str, Any]) -> Job:
    """Checks a job given as plain data.

    Raises:
      JobError: an unknown kind or field (the nearest known name is given), a missing field, or a bad value.
    """
    kind = fields.get("kind")
    if kind not in _KINDS:
        raise JobError(f"job field 'kind': got {kind!r}, expected one of {sorted(_KINDS)}; correct it in the job")
    known = {field.name: field for field in dataclasses.fields(_KINDS[kind])}
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known fields: {sorted(known)}"
            raise JobError(f"job field '{name}' is not known for kind '{kind}'; {hint}")
    missing = [
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING and name not in fields
    ]
    if missing:
        raise JobError(f"job of kind '{kind}' lacks {missing}; add them")
    return _KINDS[kind](**fields)


def load_job(path: str) -> Job:
    """Reads and checks a job file."""
    with open(path, encoding="utf-8") as file:
        return job_from_dict(json.load(file))


def geometric_lengths(num_requests: int, mean_tokens: int, cap_tokens: int, seed: int) -> list[int]:
    """Response lengths with hazard 1/mean per token, cut at the cap: the law's quantiles, in an order by seed.

    Quantiles instead of draws: 64 draws miss the mean by 11 % (one standard error), and the figure would be the seed's.
    """
    log_survival = math.log1p(-1.0 / mean_tokens)
    quantiles = ((i + 0.5) / num_requests for i in range(num_requests))
    lengths = [min(1 + int(math.log1p(-quantile) / log_survival), cap_tokens) for quantile in quantiles]
    rng = random.Random(seed)
    return sorted(lengths, key=lambda _: rng.random())


def scenario_requests(name: str, *, vocab_size: int, seed: int = 0, scale: float = 1.0) -> dict[str, Any]:
    """The requests of a named scenario, as fields of a rollout job: prompts, max_new_tokens, batch_size, kv_tokens.

    `fixed`: 16 prompts of 64 tokens, 256 new tokens each. `longtail`: 64 prompts of 64 tokens, at most 16 live,
    geometric lengths of mean 64 cut at 256. `scale` below 1 shrinks every token count, for trying things out.
    """
    if name not in ("fixed", "longtail"):
        raise JobError(f"scenario: got {name!r}, expected 'fixed' or 'longtail'; name one of them")
    prompt_len, cap, mean = (max(2, round(scale * n)) for n in (64, 256, 64))
    num_requests = 16 if name == "fixed" else 64
    rng = random.Random(seed + 1)
    prompts = [[1 + int(rng.random() * (vocab_size - 1)) for _ in range(prompt_len)] for _ in range(num_requests)]
    lengths = [cap] * num_requests if name == "fixed" else geometric_lengths(num_requests, mean, cap, seed)
    return {
        "prompts": prompts,
        "max_new_tokens": lengths,
        "batch_size": 16,
        "kv_tokens": prompt_len + cap,
        "stop_token_ids": [],
    }
