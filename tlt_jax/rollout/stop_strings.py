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
    # A match that new tokens complete begins in the last `longest` characters before them; 4 more, because the first
    # token of a slice may be the rest of a character. Some tokens have no text, so characters count, not tokens.
    longest = max(len(s) for s in stops) + 4
    base = num_checked
    while base > 0 and len(decode(token_ids[base:num_checked])) < longest:
        base = max(0, base - longest)

    def complete(num_tokens: int) -> bool:
        text = decode(token_ids[base:num_tokens])
        return any(s in text for s in stops)

    if not complete(len(token_ids)):
        return None
    return next(n for n in range(num_checked + 1, len(token_ids) + 1) if complete(n))
