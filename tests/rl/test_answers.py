"""Where a response's answer is found."""

import pytest

from tlt_jax.rl import answers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{840}, again \boxed{840}", "840"),
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\fbox{9}", "9"),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{5} then \boxed{6", "5"),
        (r"7 \boxed{}", None),
        (r"\boxed{7} \boxed{ }", None),
        ("7", None),
    ],
)
def test_last_complete_box(text, expected):
    """G3, G7: the last complete box by a balanced scan; unclosed or empty is no answer."""
    assert answers.last_box(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("out of 489 it is **73**", "73"),
        ("$1,234.50.", "1234.50"),
        (r"\$20", "20"),
        ("5-3", "3"),
        ("x = -3.", "-3"),
        ("1/2", "1/2"),
        ("1e5", "1e5"),
        (".5", ".5"),
        ("x1 and y2", None),
        ("none", None),
    ],
)
def test_last_number(text, expected):
    """G6: markdown, currency and commas do not hide a number."""
    assert answers.last_number(text) == expected


def test_tag_hash_and_text():
    assert answers.last_tag("<answer>1</answer> or <answer> 2\n</answer>") == "2"
    assert answers.last_tag("<answer>1") is None
    assert answers.last_tag("<answer> </answer>") is None
    assert answers.last_tag("<answer>1 <answer>2</answer>") == "2"
    assert answers.last_hash("4+5=9\n#### 9\n") == "9"
    assert answers.last_hash("9") is None
    assert answers.whole_text(" a b ") == "a b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"<think>maybe \boxed{3}", None),
        (r"<think>maybe \boxed{3}</think> so \boxed{4}", "4"),
        (r"<think>\boxed{3}</think> hm", None),
        (r"\boxed{3}</think> \boxed{4}", "4"),
        (r"<think>a</think> \boxed{3} <think> wait", None),
        (r"\boxed{3}", "3"),
    ],
)
def test_unfinished_thinking_earns_nothing(text, expected):
    """G10: an answer counts only outside of thinking."""
    assert answers.extract_answer(text, "boxed") == expected


def test_unknown_format_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'box'.*answer_tag.*boxed.*last_number"):
        answers.extract_answer("1", "box")
