"""Processes of a job, with threads for processes and a dict for the key-value store."""

import threading
import time

import pytest

from tlt_jax import processes
from tlt_jax.processes import DistributedConfig, Group, PeerError


def test_gathered_values_come_in_the_order_of_processes_and_are_deleted(job):
    def work(group):
        for step in range(5):
            assert group.gather("rows", b"%d of %d" % (group.index, step)) == [
                b"%d of %d" % (i, step) for i in range(3)
            ]
        group.close()
        return group.index

    results, store = job(work, count=3)
    assert results == [0, 1, 2]
    assert len(store.keys("tlt/gather/")) == 3  # of the last exchange alone


def test_a_group_of_one_needs_no_store():
    group = Group()
    group.enter("step 1, rollout")
    group.advance()
    group.agree("configuration", "x")
    group.lead("workdir", lambda: None)
    assert group.gather("rows", b"x") == [b"x"] and group.is_first
    group.close()
    with pytest.raises(ValueError, match="got no key-value store for 2 processes"):
        Group(0, 2)


def test_processes_that_differ_are_named_in_all_of_them(job):
    """E5: unequal values, and exchanges of different names, end in words instead of wrong numbers."""
    results, _ = job(lambda group: group.agree("configuration", str(min(group.index, 1))), count=3)
    assert [str(r) for r in results] == [
        "configuration: processes [1, 2] have another one than process 0; start all with the same inputs"
    ] * 3
    results, _ = job(lambda group: group.gather(f"step {group.index}", b""))
    assert "process 1 is at 'step 1' while process 0 is at 'step 0'" in str(results[0])
    assert isinstance(results[1], PeerError)


def test_process_0_leads_and_its_refusal_reaches_all(job):
    """E4: the work is done once; an error on process 0 keeps nobody waiting."""
    done = []

    def refuse():
        raise OSError("disk is full")

    results, _ = job(lambda group: [group.lead("a", lambda: done.append(group.index)), group.lead("b", refuse)])
    assert done == [0]
    assert isinstance(results[0], OSError) and isinstance(results[1], ValueError)
    assert [str(r) for r in results] == ["disk is full"] * 2


def test_a_failure_is_raised_in_the_others_with_its_phase(job):
    """E6: whether they wait or work."""

    def work(group):
        group.enter("step 2, rollout")
        if group.index == 1:
            group.fail("RewardWorkerError: no bubblewrap")
        elif group.index == 0:
            group.gather("rows", b"")
        else:
            while True:
                group.advance()
                time.sleep(0.01)

    results, _ = job(work, count=3)
    for i in (0, 2):
        assert isinstance(results[i], PeerError) and str(results[i]).startswith("process 1 (")
        assert str(results[i]).endswith(") failed in step 2, rollout: RewardWorkerError: no bubblewrap")


def test_a_process_that_stands_still_is_named(job):
    """E3, E5: process 1 sleeps in `reward` while process 0 waits for it."""
    is_over = threading.Event()

    def work(group):
        group.enter(f"step 1, {'reward' if group.index else 'rollout'}")
        if group.index == 0:
            try:
                group.gather("rows", b"")
            finally:
                is_over.set()
        is_over.wait(20)

    results, _ = job(work, stall_timeout_s=0.3)
    message = str(results[0])
    assert isinstance(results[0], PeerError) and message.startswith("no progress for 0 s: process 1 (")
    assert message.endswith(") in step 1, reward") and "process 0" not in message


def test_a_process_that_gets_on_is_waited_for(job):
    """A straggler may take as long as it takes."""

    def work(group):
        for _ in range(30 if group.index else 0):
            group.advance()
            time.sleep(0.03)
        return group.gather("rows", b"")

    assert job(work, stall_timeout_s=0.3)[0] == [[b"", b""]] * 2


def test_what_the_watch_makes_of_silence():
    group = Group()
    group.index = 1
    seen: dict = {}
    status = [processes._Status(index=i, host="h", beat=1, phase="step 1, update") for i in range(2)]
    assert group._judge(seen, status, 0.0) == ""
    status = [status[0], processes._Status(index=1, host="h", beat=9, phase="step 1, update")]
    assert group._judge(seen, status, 29.0) == ""
    assert group._judge(seen, status, 31.0) == "process 0 (h) has not been heard of for 31 s; it was in step 1, update"


def test_the_phase_is_written_where_a_launcher_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TLT_PHASE_FILE", str(tmp_path / "phase"))
    group = Group()
    group.enter("step 1, rollout")
    group.enter("step 1, update")
    assert (tmp_path / "phase").read_text() == "step 1, update"


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_processes", -1), ("process_id", -2), ("heartbeat_timeout_s", 1.0), ("stall_timeout_s", 0.0)],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"distributed.{field}: got {value}, expected"):
        DistributedConfig(**{field: value})
