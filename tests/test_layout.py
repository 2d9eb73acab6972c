"""Who may import whom, read from the sources.

    launch -> rl.loop -> coordinator -> {rollout, drafter, rl, bandit} -> models -> {sharding, types}

A module imports from its own package and from layers below; packages side by side do not know each other.
"""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "tlt_jax"

# Layers, lowest first. The modules of one group see each other; the groups of one layer do not.
LAYERS = (
    (
        (
            "tlt_jax.types",
            "tlt_jax.strategy",
            "tlt_jax.sharding",
            "tlt_jax.huge_pages",
            "tlt_jax.files",
            "tlt_jax.processes",
        ),
    ),
    (("tlt_jax.models",), ("tlt_jax.metrics",), ("tlt_jax.checkpoint",)),
    (("tlt_jax.rollout",), ("tlt_jax.drafter",), ("tlt_jax.rl",), ("tlt_jax.bandit",)),
    (("tlt_jax.coordinator",),),
    (("tlt_jax.rl.loop", "tlt_jax.rl.evaluate", "tlt_jax.rl.experience"),),  # where the packages meet
    (("launch", "configs"),),
)
MAY_IMPORT_LINEN = ("tlt_jax/models/", "tlt_jax/drafter/model.py")
WITHOUT_JAX = (
    "tlt_jax/bandit/",
    *(f"tlt_jax/coordinator/{name}.py" for name in ("messages", "state", "agent", "work")),
)
OUTSIDE = ("torch", "tensorflow", "vllm", "sglang", "tunix")  # never a dependency, not even an optional one


def _sources() -> list[pathlib.Path]:
    found = [path for top in ("tlt_jax", "launch", "configs") for path in sorted((ROOT / top).rglob("*.py"))]
    assert len(found) > 20
    return found


def _module(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _imports(path: pathlib.Path) -> set[str]:
    """What a file imports; `from a.b import c` of the project is a.b.c where that is a module, else a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                place = ROOT / pathlib.Path(*full.split("."))
                is_ours = base.split(".")[0] in ("tlt_jax", "launch", "configs")
                is_module = place.is_dir() or place.with_suffix(".py").is_file()
                names |= {full if is_module else base} if is_ours else {base, full}
    return names


def _place(module: str) -> tuple[int, int] | None:
    """(layer, group) of a module of the project; the longest prefix decides."""
    best = None
    for i, layer in enumerate(LAYERS):
        for j, group in enumerate(layer):
            for prefix in group:
                if (module == prefix or module.startswith(f"{prefix}.")) and (best is None or len(prefix) > best[0]):
                    best = (len(prefix), (i, j))
    return best[1] if best else None


def test_a_module_imports_from_its_own_package_and_from_layers_below():
    wrong = []
    for path in _sources():
        own = _place(_module(path))
        if own is None:
            assert _module(path) == "tlt_jax", f"{path} belongs to no layer; add it to LAYERS"
            continue
        for name in sorted(_imports(path)):
            other = _place(name)
            if other is not None and other != own and other[0] >= own[0]:
                wrong.append(f"{_module(path)} imports {name}, which is beside it or above it")
    assert wrong == []


def _importers(*packages: str) -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for path in _sources()
        if any(name == p or name.startswith(f"{p}.") for name in _imports(path) for p in packages)
    ]


def test_linen_is_known_to_the_models_alone():
    assert [path for path in _importers("flax.linen") if not path.startswith(MAY_IMPORT_LINEN)] == []


def test_bandit_and_the_coordinators_rules_know_no_jax():
    assert [path for path in _importers("jax", "flax", "optax") if path.startswith(WITHOUT_JAX)] == []


def test_config_files_are_known_to_configs_and_launch_alone():
    assert [path for path in _importers("ml_collections") if not path.startswith(("configs/", "launch/"))] == []


def test_other_frameworks_are_imported_nowhere():
    assert _importers(*OUTSIDE) == []


def test_package_files_are_empty():
    code = [node for path in PACKAGE.rglob("__init__.py") for node in ast.parse(path.read_text()).body]
    assert [node for node in code if not isinstance(node, ast.Expr)] == []  # a docstring is an expression
