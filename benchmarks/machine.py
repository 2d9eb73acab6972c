"""What machine a figure came from, and how fast its memory is."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import platform
import time
from typing import Any

import jax
import jaxlib
import numpy as np


def describe() -> dict[str, Any]:
    """CPU, cores in use, accelerator and library versions."""
    cpu = platform.processor()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "devices": sorted({d.device_kind for d in jax.devices()}),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def read_bandwidth(num_bytes: int = 1 << 29, repeats: int = 7) -> float:
    """Bytes per second at which all cores in use read a buffer much larger than the caches; best of `repeats`."""
    num_threads = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_threads)

    def read(part: np.ndarray) -> float:
        return float(np.dot(part, part))  # releases the interpreter lock

    best_s = float("inf")
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        for _ in range(repeats):
            start_s = time.perf_counter()
            list(pool.map(read, parts))
            best_s = min(best_s, time.perf_counter() - start_s)
    return num_bytes / best_s
