"""Files that are either whole or not there, whenever the process dies."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary path beside `path`, renamed over it at the end of the block.

    Readers see the old file or the whole new one. If the block raises, the temporary file is removed and `path`
    stays as it was.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())  # the rename must not reach the disk before the data
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces the file's content with `text`, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)
