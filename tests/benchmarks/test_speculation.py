"""The speculation benchmarks on a tiny model: their fields, their counts, and that what they compare is comparable."""

import dataclasses

import numpy as np
import pytest

from benchmarks import lossless, speculation
from launch import run_config
from tests import tiny_model
from tlt_jax.bandit.strategies import parse_arms
from tlt_jax.strategy import parse


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tiny_model.make_files(tmp_path_factory.mktemp("bench"))
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(root))
    sections = tiny_model.sections(
        root,
        drafter={"enabled": True},
        bandit={"arms": "1: plain, chain_1, ngram_1"},
        rollout={"max_live": 1, "temperature": 1.0},
    )
    yield run_config.make_run_config(sections)
    patch.undo()


@pytest.mark.slow
def test_spec_compares_equal_work(run):
    result = speculation.spec(run, [1], repeats=1, strategies=[parse("chain_1")])
    (row,) = result["rows"]
    assert result["identical_frac"] == 1.0
    assert row["batch"] == 1 and row["speedup"] == pytest.approx(row["spec_tok_s"] / row["plain_tok_s"])
    assert set(row["fixed"]) == {"chain_1"} and 1.0 <= row["fixed"]["chain_1"]["accept_len"] <= 2.0
    assert set(row["arm_rounds"]) <= {"plain", "chain_1", "ngram_1"}


@pytest.mark.slow
def test_accept_has_a_row_for_every_rule(run):
    result = speculation.accept(run, [1.0], [parse("chain_1")], num_requests=4)
    rows = {row["verify"]: row for row in result["rows"]}
    assert set(rows) == {"coupled", "target_only", "rejection"}
    assert rows["coupled"]["num_tokens"] == rows["target_only"]["num_tokens"]
    assert all(1.0 <= row["accept_len"] <= 2.0 for row in rows.values())
    without = dataclasses.replace(run, drafter=dataclasses.replace(run.drafter, enabled=False))
    with pytest.raises(ValueError, match="bench accept: got no drafter"):
        speculation.accept(without, [1.0], [parse("chain_1")], num_requests=4)


@pytest.mark.slow
def test_executables_counts_programs(run):
    result = speculation.executables(run)
    # One batch bucket and two cache buckets: decode, chain_1 drafts, one verification of width 2 for both arms.
    num_kv = len(run.rollout.kv_buckets_with(2))
    assert (result["num_pool"], result["num_naive"]) == (3 * num_kv, 4 * num_kv)
    assert result["ratio"] == result["naive_bytes"] / result["pool_bytes"] > 1.0
    assert result["compiles_after_warmup"] == 0


def test_regret_is_against_the_best_of_each_phase():
    """Phases 1 and 2-: one strategy is best in each; the adaptive one took the better one in the first phase only."""
    table = parse_arms("1: plain, ngram_1; 2: plain")

    def contestant(*calls):
        return speculation.Contestant(engine=None, calls=[speculation.Call(*c) for c in calls])  # pyright: ignore

    fixed = [contestant((1, 10, 10.0), (4, 10, 1.0)), contestant((1, 10, 5.0), (4, 10, 2.0))]
    adaptive = contestant((1, 10, 5.0), (4, 10, 2.0))
    assert speculation._regret(adaptive, fixed, table) == pytest.approx(7.0 / 6.0 - 1.0)
    assert speculation._regret(contestant((1, 10, 5.0), (4, 10, 1.0)), fixed, table) == pytest.approx(0.0)


def test_summary_of_differences():
    near, far = lossless.Difference(1, 2, 1e-6), lossless.Difference(3, 4, 0.5)
    assert lossless.summary(50_000, [near])["all_near_ties"] is True
    result = lossless.summary(50_000, [near, far])
    assert (result["num_differences"], result["per_100k_tokens"], result["all_near_ties"]) == (2, 4.0, False)
    assert np.isclose(result["differences"][1]["gap"], 0.5)
