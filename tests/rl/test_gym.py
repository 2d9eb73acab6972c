"""reasoning-gym's questions are the same in every process, and so are their scores."""

import subprocess
import sys

import pytest

from tlt_jax.rl import gym, rewards

PARAMS = "{}"


def test_questions_do_not_depend_on_the_hash_seed(monkeypatch):
    """C5: these sets change with the hash seed, which a resumed run would draw anew."""
    specs = [(name, 3, 1, PARAMS) for name in ("polynomial_multiplication", "isomorphic_strings", "ransom_note")]
    listed = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        listed.append(gym.make_records(specs))
    assert listed[0] == listed[1]
    assert [len(records) for records in listed[0]] == [3, 3, 3]


def test_own_answers_score_one_in_the_workers():
    """A worker scores against the entry that the prompt came from, in sets that the hash seed changes too."""
    name = "polynomial_multiplication"
    (records,) = gym.make_records([(name, 4, 1, PARAMS)])
    spec = {"dataset": name, "size": 4, "seed": 1, "params": {}}
    items = [
        rewards.RewardItem(
            row_id=index,
            text=record["answer"],
            reference={"format": "text", "reasoning_gym": {**spec, "index": index}},
        )
        for index, record in enumerate(records)
    ]
    with rewards.RewardPool(rewards.RewardConfig(weights={"reasoning_gym": 1.0}, num_workers=1, timeout_s=20)) as pool:
        assert pool.score(items).scores.tolist() == [1, 1, 1, 1]


def test_a_set_without_answers_and_an_empty_set():
    listed = gym.make_records([("graph_color", 1, 0, PARAMS), ("graph_color", 0, 0, PARAMS)])
    assert [record["answer"] for record in listed[0]] == [""]
    assert listed[1] == []


def test_unknown_dataset_and_parameters_are_named():
    with pytest.raises(ValueError, match=r"^reasoning_gym data set: got 'chain_sums'.*chain_sum"):
        gym.make_records([("chain_sums", 1, 0, PARAMS)])
    with pytest.raises(ValueError, match=r"'chain_sum': refused parameters.*max_term"):
        gym.find_dataset("chain_sum", 1, 0, '{"max_term": 2}')


def test_imports_without_a_compiled_solver():
    """A machine without a C compiler has no pycosat; all sets but the one that solves with it still work."""
    code = (
        "import sys; sys.modules.pop('pycosat', None)\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pycosat': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from tlt_jax.rl import gym\n"
        "print(gym.find_dataset('chain_sum', 1, 0, '{}')[0]['answer'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == int(gym.make_records([("chain_sum", 1, 0, PARAMS)])[0][0]["answer"])
