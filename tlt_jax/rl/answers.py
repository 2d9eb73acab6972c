r"""Finding the final answer in a response. Pure functions of text, no dependencies.

Rules, the same for every format:
  1. Only what comes after the thinking counts: text up to the last `</think>` is dropped, and a
     `<think>` that is never closed leaves nothing, so a guess inside unfinished thinking earns nothing.
  2. Repeated answers: the last complete one counts.
  3. An answer that is empty or unclosed (`\boxed{`, `<answer>`) is no answer: None, never a fallback to
     some other number of the text.

Formats: `boxed` is `\boxed{...}` or `\fbox{...}`, found by counting braces; `answer_tag` is
`<answer>...</answer>`; `hash` is the rest of the line after `####`; `last_number` is the last number,
freed of markdown, currency signs and thousands commas; `text` is the whole visible text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_HASH = re.compile(r"####[ \t]*([^\n]*)")
# A sign counts only where no operand stands before it, so "5-3" ends in 3 and "= -3" in -3.
_NUMBER = re.compile(r"(?<![\w.)])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?(?:/\d+)?")


def visible_text(text: str) -> str | None:
    """The part of a response that a reader sees; None where thinking was opened and not closed."""
    close = text.rfind(THINK_CLOSE)
    if text.rfind(THINK_OPEN) > close:
        return None
    return text if close < 0 else text[close + len(THINK_CLOSE) :]


def last_box(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`; None where no box closes or the last one is empty."""
    for match in reversed(list(_BOX.finditer(text))):
        end = _closing_brace(text, match.end())
        if end is not None:
            return text[match.end() : end].strip() or None
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 1, start
    while position < len(text):
        if text[position] == "\\":  # an escaped brace is a character of the answer
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
        position += 1
    return None


def last_tag(text: str) -> str | None:
    """Content of the last complete `<answer>...</answer>`."""
    found = _TAG.findall(text)
    return (found[-1].strip() or None) if found else None


def last_hash(text: str) -> str | None:
    """Rest of the line after the last `####`, as grade-school data sets mark their answers."""
    found = _HASH.findall(text)
    return (found[-1].strip() or None) if found else None


def last_number(text: str) -> str | None:
    """The last number of the text as digits: `**1,234**` and `$1,234.` give "1234"."""
    plain = re.sub(r"[*_`$]|\\[$(),!\[\]]", " ", text)
    found = _NUMBER.findall(plain)
    return found[-1].replace(",", "").lstrip("+") if found else None


def whole_text(text: str) -> str | None:
    """The text itself without surrounding space; None where nothing is left."""
    return text.strip() or None


ANSWER_FORMATS: dict[str, Callable[[str], str | None]] = {
    "boxed": last_box,
    "answer_tag": last_tag,
    "hash": last_hash,
    "last_number": last_number,
    "text": whole_text,
}


def extract_answer(text: str, answer_format: str) -> str | None:
    """The final answer of a response in the given format, or None.

    Raises:
      ValueError: unknown format.
    """
    if answer_format not in ANSWER_FORMATS:
        raise ValueError(f"answer_format: got {answer_format!r}, expected one of {sorted(ANSWER_FORMATS)}")
    visible = visible_text(text)
    return None if visible is None else ANSWER_FORMATS[answer_format](visible)
