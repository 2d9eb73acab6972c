"""Questions and scorers of reasoning-gym, the same in every process.

A data set is meant to be fixed by its seed, but some (`polynomial_multiplication`, `word_ladder`, `ransom_note`,
`isomorphic_strings`, `knight_swap`, `list_functions` in 0.1.25) iterate over sets of strings, whose order Python draws
anew in every process. So entries are only ever made in processes whose hash seed is pinned: `make_records` starts one
to list the questions, and the reward workers are such processes too. Otherwise a resumed run would meet other
questions, and a worker would score against another answer.

`python -m tlt_jax.rl.gym` is that process: a JSON list of [name, size, seed, params] in, one list of records each out.
"""

from __future__ import annotations

import difflib
import functools
import json
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from tlt_jax.rl import sandbox

Spec = tuple[str, int, int, str]  # data set, size, seed, parameters as a JSON object


def make_records(specs: Sequence[Spec]) -> list[list[dict[str, str]]]:
    """The `question` and `answer` of every entry, for each spec; answer "" where a data set carries none.

    Raises:
      ValueError: no such data set, or parameters that it refuses.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tlt_jax.rl.gym"],
        input=json.dumps(specs),
        env=sandbox.worker_environment(sandbox.NONE),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1].removeprefix("ValueError: "))
    return json.loads(done.stdout)


def import_reasoning_gym():
    """The package, which a machine without `pycosat` (no wheel: it needs a C compiler) can import too.

    One data set of a hundred, `zebra_puzzles`, solves with it; an empty module stands in and fails there alone.
    """
    try:
        import pycosat  # noqa: F401
    except ModuleNotFoundError:
        sys.modules["pycosat"] = types.ModuleType("pycosat", "stand-in: install a C compiler and pycosat")
    import reasoning_gym  # slow import

    return reasoning_gym


@functools.lru_cache(maxsize=8)
def find_dataset(name: str, size: int, seed: int, params: str):
    """The data set itself; its scorer may execute the text it is given.

    Raises:
      ValueError: as `make_records`.
    """
    reasoning_gym = import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:3]
        raise ValueError(f"reasoning_gym data set: got {name!r}, expected one of its own, nearest {nearest}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(params))
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym data set {name!r}: refused parameters {params}: {error}") from error


@functools.lru_cache(maxsize=4096)
def _entry(name: str, size: int, seed: int, params: str, index: int):
    dataset = find_dataset(name, size, seed, params)
    return dataset, dataset[index]


def find_entry(spec: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The data set and the entry that `reference["reasoning_gym"]` names; cached.

    The entry is made again rather than sent, as most hold values that JSON cannot carry.
    """
    params = json.dumps(spec["params"], sort_keys=True)
    return _entry(spec["dataset"], spec["size"], spec["seed"], params, spec["index"])


def main() -> None:
    """Lists the entries of the specs on stdin."""
    specs = json.load(sys.stdin)
    answer_to = sys.stdout
    sys.stdout = sys.stderr  # some data sets print
    listed = []
    for name, size, seed, params in specs:
        dataset = find_dataset(name, size, seed, params) if size else ()
        entries = (dataset[index] for index in range(size))
        listed.append([{"question": entry["question"], "answer": entry["answer"] or ""} for entry in entries])
    json.dump(listed, answer_to)


if __name__ == "__main__":
    main()
