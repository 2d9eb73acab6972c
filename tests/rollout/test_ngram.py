"""Model-free drafts: which match wins, and that nothing is proposed where nothing matches."""

import copy

import pytest

from tlt_jax.rollout.ngram import NgramConfig, NgramDrafter


def drafter(prompt=(), response=(), **config) -> NgramDrafter:
    made = NgramDrafter(NgramConfig(**{"max_n": 2, "min_n": 2} | config))
    made.start(0, tuple(prompt))
    made.append(0, response)
    return made


@pytest.mark.parametrize(
    ("text", "max_tokens", "expected"),
    [
        ([1, 2, 3, 4], 4, []),  # no repeat
        ([7], 4, []),  # shorter than n
        ([5, 6, 1, 2], 4, []),  # the only match is the end itself, which has no follower
        ([1, 2, 9, 1, 2], 0, []),  # no room
        ([1, 2, 9, 1, 2], 1, [9]),
        ([1, 2, 9, 1, 2], 4, [9, 1, 2]),  # as far as the text goes
    ],
)
def test_drafts(text, max_tokens, expected):
    """A32: without a match there is no draft, and no made-up token."""
    assert list(drafter(text).propose(0, max_tokens)) == expected


def test_latest_match_wins_among_equals():
    """A33: of [1,2,9,1,2,8,1,2] the continuation is 8."""
    assert list(drafter([1, 2, 9, 1, 2, 8, 1, 2]).propose(0, 1)) == [8]


def test_longest_match_comes_before_latest():
    """A33: a match of three tokens beats a later one of two."""
    text = [3, 1, 2, 9, 4, 1, 2, 8, 3, 1, 2]
    assert list(drafter(text, max_n=3).propose(0, 1)) == [9]
    assert list(drafter(text, max_n=2).propose(0, 1)) == [8]


def test_siblings_and_earlier_epochs_are_searched():
    made = drafter((1, 2), (5, 6, 7, 8))
    made.start(1, (1, 2))
    made.append(1, (5, 6))
    assert list(made.propose(1, 4)) == [7, 8]  # from the running sibling
    made.finish(0)
    made.finish(1)
    made.start(2, (1, 2))
    assert list(made.propose(2, 2)) == [5, 6]  # from the prompt's own follower in an earlier response
    made.start(3, (9, 9))
    made.append(3, (5, 6))
    assert list(made.propose(3, 4)) == []  # another prompt's texts are not searched


def test_proposing_changes_nothing():
    """A17: propose, reject, and the state is as before."""
    made = drafter((1, 2, 3), (1, 2, 3, 1, 2))
    before = copy.deepcopy({p: vars(g) for p, g in made._groups.items()})
    assert list(made.propose(0, 3)) == [3, 1, 2]
    assert {p: vars(g) for p, g in made._groups.items()} == before


def test_memory_is_bounded():
    made = NgramDrafter(NgramConfig(max_n=2, min_n=1, max_prompts=2, max_responses=2))
    for i in range(12):
        made.start(i, (i // 4, 1))
        made.append(i, (i, i + 1))
        made.finish(i)
    assert [p[0] for p in made._groups] == [1, 2]
    for group in made._groups.values():
        assert len(group.texts) == 2
        assert {owner for owner, _ in group.latest.values()} <= set(group.texts)


def test_bad_settings_and_ids():
    with pytest.raises(ValueError, match=r"ngram\.max_n: got 1, expected >= min_n 2"):
        NgramConfig(max_n=1, min_n=2)
    made = drafter((1, 2))
    with pytest.raises(ValueError, match="got request 0 twice"):
        made.start(0, (1, 2))
