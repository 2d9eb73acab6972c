"""What each verifier gives for right, wrong and hostile answers."""

import concurrent.futures

import pytest

from tlt_jax.rl import gym, verifiers

BOXED = {"format": "boxed"}


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"\boxed{840} ... \boxed{840}", "840", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", 0.0),
        (r"the answer is 7 \boxed{}", "7", 0.0),
        (r"\boxed{**73**}", "73", 1.0),
        (r"\boxed{x^2+1}", "1+x^2", 1.0),
        (r"\boxed{(3,\frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{\text{Bob}}", r"\text{Evelyn}", 0.0),
        (r"<think>\boxed{3}", "3", 0.0),
        (r"<think>x</think>\boxed{3}", "3", 1.0),
    ],
)
def test_math(text, answer, expected):
    """G3, G6, G7, G10 through the whole verifier."""
    assert verifiers.score_math(text, {**BOXED, "answer": answer}) == expected


def test_math_takes_the_bold_number():
    """G6: 489 stands nearer to nothing than the bold 73."""
    reference = {"format": "last_number", "answer": "73"}
    assert verifiers.score_math("of 489 pupils, **73** remain", reference) == 1.0
    assert verifiers.score_math("of 489 pupils, **73** remain", {**reference, "answer": "489"}) == 0.0


def test_math_works_off_the_main_thread():
    """G1: the library's signal-based limits are off."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(verifiers.score_math, r"\boxed{3}", {**BOXED, "answer": "3"}).result() == 1.0


def test_math_refuses_a_reference_that_is_no_formula():
    with pytest.raises(ValueError, match="not a formula"):
        verifiers.score_math(r"\boxed{3}", {**BOXED, "answer": ""})


def test_thinking_opened_by_the_prompt():
    """G10: where the prompt ends in `<think>`, the response must close it."""
    reference = {**BOXED, "answer": "3", "opens_think": True}
    assert verifiers.score_number(r"I guess \boxed{3}", reference) == 0.0
    assert verifiers.score_number(r"I guess </think> \boxed{3}", reference) == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("0.50", 1.0), ("1/2", 1.0), ("5e-1", 1.0), ("0.51", 0.0), ("1/0", 0.0), ("1e999999999", 0.0), ("x", 0.0)],
)
def test_number(answer, expected):
    assert verifiers.score_number(rf"\boxed{{{answer}}}", {**BOXED, "answer": "1/2"}) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("(2+3)*4", 1.0),
        ("40/2", 1.0),
        ("21", 0.0),
        ("9**9**9**9", 0.0),
        ("1/0", 0.0),
        ("__import__('os')", 0.0),
        ("(", 0.0),
    ],
)
def test_arithmetic_is_walked_not_executed(answer, expected):
    assert verifiers.score_arithmetic(rf"\boxed{{{answer}}}", {**BOXED, "answer": "20"}) == expected


def test_exact_and_format():
    assert verifiers.score_exact(r"\boxed{Two  Words}", {**BOXED, "answer": "two words"}) == 1.0
    assert verifiers.score_exact(r"\boxed{two}", {**BOXED, "answer": "two words"}) == 0.0
    assert verifiers.score_format(r"\boxed{wrong}", BOXED) == 1.0
    assert verifiers.score_format("wrong", BOXED) == 0.0


def test_reasoning_gym_scores_its_own_entry():
    spec = {"dataset": "chain_sum", "size": 4, "seed": 7, "params": {"max_terms": 2}, "index": 2}
    _, entry = gym.find_entry(spec)
    reference = {"format": "answer_tag", "reasoning_gym": spec}
    assert verifiers.score_reasoning_gym(f"<answer>{entry['answer']}</answer>", reference) == 1.0
    assert 0.0 <= verifiers.score_reasoning_gym("<answer>no</answer>", reference) < 0.1
    assert verifiers.score_reasoning_gym(entry["answer"], reference) == 0.0


def test_weighted_sum_and_names():
    score = verifiers.make_scorer({"number": 1.0, "format": 0.25})
    assert score(r"\boxed{3}", {**BOXED, "answer": "3"}) == 1.25
    assert score(r"\boxed{4}", {**BOXED, "answer": "3"}) == 0.25
    assert verifiers.load_verifier("operator:length_hint")("abc", 0) == 3
    for name, words in (
        ("maths", "'maths'.*math.*module:function"),
        ("no_such_mod:f", "no_such_mod"),
        ("os:nothing", "nothing"),
    ):
        with pytest.raises(ValueError, match=words):
            verifiers.load_verifier(name)


def test_a_score_that_is_no_number_is_an_error(monkeypatch):
    monkeypatch.setitem(verifiers.VERIFIERS, "format", lambda text, reference: float("nan"))
    with pytest.raises(ValueError, match="'format': got nan"):
        verifiers.make_scorer({"format": 1.0})("", {})
