"""The pins, the license and the two commands stay what the README says they are."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pairs = (re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines if line and not line.startswith("#"))
    return {re.sub("[-_.]+", "-", m[1]).lower(): m[2] for m in pairs if m}


def test_every_dependency_is_pinned_once_for_each_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.sub("[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", d)[0]).lower() for d in project["dependencies"]}
    for name in ("py311.txt", "py312.txt"):
        lines = [s for s in (ROOT / "requirements" / name).read_text().splitlines() if s and not s.startswith("#")]
        pins = _pins(name)
        assert len(pins) == len(lines), "each line is NAME==VERSION, no name twice"
        assert wanted - set(pins) == set()
        assert "torch" not in pins


def test_pinned_jax_and_flax_are_a_pair_that_works():
    assert (_pins("py311.txt")["jax"], _pins("py311.txt")["flax"]) == ("0.10.2", "0.12.8")
    assert (_pins("py312.txt")["jax"], _pins("py312.txt")["flax"]) == ("0.12.0.1", "0.12.12")


def test_ci_runs_what_the_makefile_offers():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert {"setup", "quickstart", "test", "lint", "bench", "parity", "clean"} <= targets
    assert "make lint test" in (ROOT / ".ci" / "run").read_text()
    assert (ROOT / "LICENSE").read_text().count("Apache License") >= 1
