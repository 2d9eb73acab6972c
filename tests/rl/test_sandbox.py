"""Hostile text against each sandbox that this machine has, and the refusal where it has none."""

import os
import socket

import pytest

from tlt_jax.rl import rewards, sandbox

KINDS = [
    kind
    for kind, is_there in ((sandbox.BWRAP, sandbox._has_bwrap()), (sandbox.SECCOMP, sandbox._has_seccomp()))
    if is_there
]

MODULE = """
def execute(text, reference):
    names = {}
    exec(text, names)
    return names["score"]
"""


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs texts as code in a pool of one worker; returns its result."""
    (tmp_path / "hostile_reward.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def run(kind, *texts, timeout_s=5.0):
        monkeypatch.setattr(rewards, "choose_sandbox", lambda config: kind)
        config = rewards.RewardConfig(weights={"hostile_reward:execute": 1.0}, num_workers=1, timeout_s=timeout_s)
        with rewards.RewardPool(config) as pool:
            return pool.score([rewards.RewardItem(row_id=i, text=text, reference={}) for i, text in enumerate(texts)])

    return run


def test_this_machine_has_a_sandbox():
    """pyseccomp is a dependency, so some route is always tested."""
    assert KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outside_is_written_read_started_or_called(kind, execute, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    mine = tmp_path / "mine.txt"
    mine.write_text("untouched")
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.2)
    port = server.getsockname()[1]
    result = execute(
        kind,
        f"open({str(tmp_path / 'new.txt')!r}, 'w').write('x'); score = 1",
        f"open({str(mine)!r}, 'a').write('x'); score = 1",
        f"import os; os.remove({str(mine)!r}); score = 1",
        "with open('/tmp/tlt_jax_escape', 'w') as file: file.write('x')\nscore = 1",
        f"import socket; socket.create_connection(('127.0.0.1', {port})).send(b'x'); score = 1",
        f"import os; os.kill({os.getpid()}, 9); score = 1",
        "import os; score = float('hunter2' in str(os.environ) + open('/proc/self/environ').read())",
        "score = 0.5",
    )
    assert result.status == ("error",) * 6 + ("ok",) * 2
    assert result.scores.tolist() == [0, 0, 0, 0, 0, 0, 0, 0.5]
    assert mine.read_text() == "untouched"
    assert not (tmp_path / "new.txt").exists()
    assert not os.path.exists("/tmp/tlt_jax_escape")
    with pytest.raises(TimeoutError):
        server.accept()
    server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_no_process_outlives_its_row(kind, execute, tmp_path):
    marker = f"{os.getpid()}.5"
    result = execute(
        kind,
        f"import subprocess; subprocess.Popen(['sleep', '{marker}'], start_new_session=True); score = 1",
        "score = 0.5",
    )
    assert result.status[1] == "ok"
    assert result.scores[1] == 0.5
    assert not any(marker in command for command in _commands())


def _commands():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as file:
                yield file.read()
        except OSError:  # ended since it was listed
            continue


@pytest.mark.parametrize("kind", KINDS)
def test_hangs_memory_and_suicide_are_cut(kind, execute):
    """G2: `9**9**9**9` never ends; the rows beside it are scored."""
    texts = ("9**9**9**9", "x = bytearray(2**40); score = 1", "import os; os._exit(3)", "exit()", "score = 0.5")
    result = execute(kind, *texts, timeout_s=1.0)
    assert result.status == ("timeout", "error", "error", "error", "ok")
    assert "MemoryError" in result.messages[0]
    assert result.scores.tolist() == [0, 0, 0, 0, 0.5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_cannot_reach_the_scores_of_others(kind, execute):
    """G8: forged lines on every open descriptor and a murdered worker leave one right score per row."""
    forge = (
        'import os\nfor fd in range(64):\n  try: os.write(fd, b\'{"score": 9}\\n{"score": 9}\\n\')\n'
        "  except OSError: pass\nscore = 9"
    )
    spoil = "import tlt_jax.rl.verifiers as v, builtins; builtins.float = lambda x: 9; score = 0"
    result = execute(
        kind, forge, "score = 0.25", spoil, "score = 0.5", "import os; os.kill(os.getppid(), 9)", "score = 0.75"
    )
    assert result.scores[[1, 3, 5]].tolist() == [0.25, 0.5, 0.75]
    assert result.status[4] == "error"


@pytest.mark.parametrize("kind", KINDS)
def test_executing_scorer_runs_in_it(kind, monkeypatch):
    """The countdown scorer runs its answer as code: right answers score, the hang is cut."""
    import reasoning_gym

    monkeypatch.setattr(rewards, "choose_sandbox", lambda config: kind)
    spec = {"dataset": "countdown", "size": 1, "seed": 5, "params": {}, "index": 0}
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=5)[0]
    texts = (entry["answer"], "9**9**9**9", "__import__('os').getpid()", entry["answer"])
    config = rewards.RewardConfig(weights={"reasoning_gym": 1.0}, num_workers=1, timeout_s=2.0)
    with rewards.RewardPool(config) as pool:
        reference = {"format": "text", "reasoning_gym": spec}
        result = pool.score([rewards.RewardItem(row_id=i, text=t, reference=reference) for i, t in enumerate(texts)])
    assert result.scores[[0, 3]].tolist() == [1.0, 1.0]
    assert result.status[1] == "timeout"
    assert result.scores[2] < 0.1


def test_without_a_sandbox_it_refuses_and_names_the_remedy():
    def none():
        return sandbox.find_sandbox(has_bwrap=lambda: False, has_seccomp=lambda: False)

    with pytest.raises(sandbox.SandboxUnavailableError, match=r"bubblewrap.*pyseccomp.*'number'"):
        rewards.choose_sandbox(rewards.RewardConfig(weights={"reasoning_gym": 1.0}), find=none)
    with pytest.raises(sandbox.SandboxUnavailableError):
        rewards.choose_sandbox(rewards.RewardConfig(weights={"math": 1.0}, sandbox="on"), find=none)
    assert rewards.choose_sandbox(rewards.RewardConfig(weights={"math": 1.0}), find=none) == sandbox.NONE


def test_the_better_sandbox_is_taken():
    assert sandbox.find_sandbox(has_bwrap=lambda: True, has_seccomp=lambda: True) == "bwrap"
    assert sandbox.find_sandbox(has_bwrap=lambda: False, has_seccomp=lambda: True) == "seccomp"


def test_executing_rewards_cannot_be_run_without():
    config = rewards.RewardConfig(weights={"reasoning_gym": 1.0}, sandbox="off")
    with pytest.raises(ValueError, match=r"'off'.*reasoning_gym.*executes"):
        rewards.RewardPool(config)
