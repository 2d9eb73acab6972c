r"""Verifiers: pure functions `(text, reference) -> float` in [0, 1], and their weighted sum.

`text` is the response alone. `reference` is the plain dict that the task stored with the prompt:
`answer` (the right answer), `format` (how a response states its own; see `answers`), `opens_think` (the
prompt itself ends inside `<think>`), and `reasoning_gym` (which entry of which data set) where it applies.

A verifier may raise, hang or exhaust memory on some text; the process that runs it sees to that (see
`rewards`). It never executes text, with one exception: reasoning-gym's scorers do, so
`reward_executes_text` names them and the pool demands a sandbox.

Heavy libraries are imported at first use, and this module imports no jax: workers start fast.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, cast

from tlt_jax.rl import answers, gym

Reference = Mapping[str, Any]
Verifier = Callable[[str, Reference], float]


def response_answer(text: str, reference: Reference) -> str | None:
    """The response's final answer under the reference's format; None where there is none."""
    if reference.get("opens_think"):
        text = answers.THINK_OPEN + text
    return answers.extract_answer(text, reference.get("format", "boxed"))


def score_format(text: str, reference: Reference) -> float:
    """1 where the response states a non-empty answer in the asked format, right or wrong."""
    return float(response_answer(text, reference) is not None)


def score_exact(text: str, reference: Reference) -> float:
    """1 where the answer is the reference's, up to case and runs of white space."""
    answer = response_answer(text, reference)
    return float(answer is not None and _squeeze(answer) == _squeeze(str(reference["answer"])))


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().casefold()


def score_number(text: str, reference: Reference) -> float:
    """1 where the answer is the reference's number exactly: "0.50", "1/2" and "5e-1" are equal."""
    answer = response_answer(text, reference)
    if answer is None:
        return 0.0
    value = _as_fraction(answer)
    return float(value is not None and value == _as_fraction(str(reference["answer"])))


def _as_fraction(text: str) -> Fraction | None:
    number = answers.last_number(text)
    # A long exponent would build the power itself: 1e999999999 is an attack, not an answer.
    if number is None or re.search(r"[eE][-+]?\d{4,}", number):
        return None
    numerator, _, denominator = number.partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(numerator) / int(denominator or 1)


def score_arithmetic(text: str, reference: Reference) -> float:
    """1 where the answer is an arithmetic expression whose value is the reference's number.

    The expression is walked by simpleeval (numbers, + - * / ** and parentheses, bounded powers), never
    executed; whatever it does not know is a wrong answer.
    """
    import simpleeval

    answer = response_answer(text, reference)
    target = _as_fraction(str(reference["answer"]))
    if answer is None or target is None or not re.fullmatch(r"[\d\s.+\-*/()]+", answer):
        return 0.0
    try:
        value = simpleeval.SimpleEval(functions={}, names={}).eval(answer.strip())
    except (simpleeval.InvalidExpression, SyntaxError, ArithmeticError, ValueError):
        return 0.0
    return float(math.isclose(value, float(target), rel_tol=1e-9, abs_tol=1e-9))


def score_math(text: str, reference: Reference) -> float:
    """1 where math-verify finds the answer equal to the reference's, as LaTeX or as an expression.

    The answer is cut out here and handed over boxed, so that the library's own search (which takes a
    neighbouring number for a bold or an empty answer) has nothing to choose.
    """
    import math_verify  # slow import

    answer = response_answer(text, reference)
    if answer is None:
        return 0.0
    # The library's own limits use signals, which fail off the main thread; the worker has a harder one.
    parse = functools.partial(math_verify.parse, parsing_timeout=0, raise_on_error=False)
    gold = parse(_boxed(str(reference["answer"])))
    if not gold:
        raise ValueError(f"reference answer {reference['answer']!r} is not a formula: use reward 'exact'")
    return float(math_verify.verify(gold, parse(_boxed(answer)), timeout_seconds=0, raise_on_error=True))


def _boxed(answer: str) -> str:
    bare = answer.strip().strip("$").replace("**", "") if answer.count("**") == 2 else answer.strip().strip("$")
    return rf"$\boxed{{{bare}}}$"


def score_reasoning_gym(text: str, reference: Reference) -> float:
    """The data set's own score of the answer, clamped to [0, 1]; executes text, so sandboxed only.

    Some scorers give 0.01 for a wrong answer: kept, as the data set means it. `boxnet`, `graph_color`,
    `propositional_logic`, `rubiks_cube` and `rush_hour` carry no answer of their own and are judged by rule.
    """
    answer = response_answer(text, reference)
    if answer is None:
        return 0.0
    dataset, entry = gym.find_entry(reference["reasoning_gym"])
    score = dataset.score_answer(answer=answer, entry=entry)
    return min(max(float(score), 0.0), 1.0)


VERIFIERS: dict[str, Verifier] = {
    "arithmetic": score_arithmetic,
    "exact": score_exact,
    "format": score_format,
    "math": score_math,
    "number": score_number,
    "reasoning_gym": score_reasoning_gym,
}


def is_user_function(name: str) -> bool:
    """True for a reward named by import path, 'package.module:function'."""
    return ":" in name


def reward_executes_text(name: str) -> bool:
    """True for a built-in reward whose scorer may run the response as code."""
    return name == "reasoning_gym"


def check_reward_name(name: str) -> None:
    """Raises ValueError unless `name` is built in or names a module that can be found."""
    module = name.partition(":")[0]
    if not is_user_function(name):
        if name not in VERIFIERS:
            known = ", ".join(sorted(VERIFIERS))
            raise ValueError(f"reward: got {name!r}, expected one of {known}, or 'package.module:function'")
    elif importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ValueError(f"reward {name!r}: no module {module!r}; is its folder on PYTHONPATH?")


def load_verifier(name: str) -> Verifier:
    """The function behind a reward name, user functions by import path included."""
    check_reward_name(name)
    if not is_user_function(name):
        return VERIFIERS[name]
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute, None)
    if not callable(function):
        raise ValueError(f"reward {name!r}: {module} has no function {attribute!r}")
    return cast(Verifier, function)


def make_scorer(weights: Mapping[str, float]) -> Verifier:
    """The weighted sum of named rewards, e.g. `{"math": 1.0, "format": 0.1}`.

    Raises:
      ValueError: unknown reward; at call, a verifier that returns something other than a finite number.
    """
    parts = [(name, weight, load_verifier(name)) for name, weight in weights.items()]

    def score(text: str, reference: Reference) -> float:
        total = 0.0
        for name, weight, verifier in parts:
            value = float(verifier(text, reference))
            if not math.isfinite(value):
                raise ValueError(f"reward {name!r}: got {value}, expected a finite number")
            total += weight * value
        return total

    return score
