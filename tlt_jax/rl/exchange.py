"""What the processes of a job tell each other after a rollout: responses, scores, times.

Every process generates and scores some of the requests. `exchange` brings all shares to all processes, so that from
there on each of them computes the same: batches, decisions, metrics. A share travels as one JSON line of everything
small, then the token ids and log-probs as they lie in memory: floats come out as they went in.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tlt_jax.processes import Group
from tlt_jax.types import Completion, Request

_FIELDS = tuple(f.name for f in dataclasses.fields(Completion) if f.name not in ("prompt_ids", "token_ids", "logprobs"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """The rows of a batch that one process has generated, in any order."""

    rows: tuple[int, ...]  # places in the batch's requests
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    scores: tuple[float, ...]
    status: tuple[str, ...]
    messages: tuple[str, ...]  # of rewards that failed
    rollout_s: float


def exchange(share: Share, requests: Sequence[Request], group: Group) -> list[Share]:
    """The shares of all processes, in their order.

    Args:
      share: of this process.
      requests: of the whole batch; the same in every process.
      group: all of them enter.
    """
    if group.count == 1:
        return [share]
    return [unpack(data, requests) for data in group.gather("responses", pack(share))]


def pack(share: Share) -> bytes:
    """As one string of bytes; `unpack` is the inverse."""
    own = {f.name: getattr(share, f.name) for f in dataclasses.fields(Share) if f.name != "completions"}
    small = [[getattr(c, name) for name in _FIELDS] for c in share.completions]
    header = own | {"completions": small, "lengths": [len(c.token_ids) for c in share.completions]}
    tokens = [np.asarray(c.token_ids, "<i4").tobytes() for c in share.completions]
    logprobs = [np.asarray(c.logprobs, "<f4").tobytes() for c in share.completions]
    return b"".join([json.dumps(header, default=_as_python).encode(), b"\n", *tokens, *logprobs])


def unpack(data: bytes, requests: Sequence[Request]) -> Share:
    """The share that was packed; prompts are those of `requests`."""
    line, _, arrays = data.partition(b"\n")
    header = json.loads(line)
    lengths = header.pop("lengths")
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if lengths else 0
    tokens = np.frombuffer(arrays, "<i4", total).astype(np.int32)
    logprobs = np.frombuffer(arrays, "<f4", total, 4 * total).astype(np.float32)
    completions = [
        Completion(
            **dict(zip(_FIELDS, values, strict=True)),
            prompt_ids=requests[row].prompt_ids,
            token_ids=tokens[end - n : end],
            logprobs=logprobs[end - n : end],
        )
        for row, values, n, end in zip(header["rows"], header.pop("completions"), lengths, ends, strict=True)
    ]
    rest: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in header.items()}
    return Share(completions=tuple(completions), **rest)


def sum_over_processes(counts: Mapping[str, float], group: Group) -> dict[str, float]:
    """Every process's counts added up; a name that some lack counts 0 there."""
    total: dict[str, float] = {}
    for data in group.gather("counts", json.dumps(counts, default=_as_python).encode()):
        for name, value in json.loads(data).items():
            total[name] = total.get(name, 0) + value
    return total


def _as_python(value: Any) -> Any:
    return value.item()  # a numpy scalar
