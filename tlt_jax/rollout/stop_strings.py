"""Finding the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def find_stop(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], num_checked: int, stops: Sequence[str]
) -> int | None:
    """Number of tokens up to and with the one that completes the first stop string; None without one.

    Args:
      decode: token ids to text.
      token_ids: the response so far.
      num_checked: leading tokens that are known to complete none.
      stops: non-empty strings.
    """
    # Every character of a stop string comes from at most one token more than itself has bytes.
    overlap = max(len(s.encode()) for s in stops) + 4
    base = max(0, num_checked - overlap)

    def complete(num_tokens: int) -> bool:
        text = decode(token_ids[base:num_tokens])
        return any(s in text for s in stops)

    if not complete(len(token_ids)):
        return None
    return next(n for n in range(num_checked + 1, len(token_ids) + 1) if complete(n))
