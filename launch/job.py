"""This process's place in a job of several: how it joins, and how it leaves.

Life of a process:
  1. `joined` finds out which process this one is, from the `distributed` section or the environment, and joins the
     others before any device is used.
  2. It leaves by the end of the block: after a success together with all others; after a failure at once, having told
     the others, past Python's exit handlers: jax's would wait for processes that may never come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import logging

from launch.cli import EXIT_BAD_INPUT, EXIT_FAILED
from launch.config import ConfigError
from launch.fetch import FetchError
from tlt_jax.processes import DistributedConfig, Group, PeerError, make_group

# Jobs of several tasks under these launchers are known to jax.distributed.
_MANAGED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What is known of the job; what is None is found out by `jax.distributed`."""

    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None

    @property
    def is_whole(self) -> bool:
        return None not in (self.coordinator_address, self.num_processes, self.process_id)


def find_place(config: DistributedConfig, environ: Mapping[str, str]) -> Place | None:
    """Which process of which job this is; None where it is the only one.

    Raises:
      ConfigError: some of coordinator, number and index are known but not all, and no launcher knows the rest.
    """
    place = Place(
        coordinator_address=config.coordinator_address or environ.get("JAX_COORDINATOR_ADDRESS") or None,
        num_processes=config.num_processes or _number(environ, "JAX_NUM_PROCESSES"),
        process_id=config.process_id if config.process_id >= 0 else _number(environ, "JAX_PROCESS_ID"),
    )
    if place.num_processes == 1:
        return None
    if place.is_whole or any((_number(environ, name) or 1) > 1 for name in _MANAGED):
        return place
    if place == Place(coordinator_address=None, num_processes=None, process_id=None):
        return None
    raise ConfigError(
        f"distributed: got coordinator_address={place.coordinator_address!r}, num_processes={place.num_processes}, "
        f"process_id={place.process_id}, expected all three or none; set them in the config, or "
        "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment"
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name}: got {text!r} in the environment, expected a whole number")
    return int(text) if text else None


@contextlib.contextmanager
def joined(config: DistributedConfig) -> Iterator[Group]:
    """Joins the job for the length of the block. To be entered before any device is used.

    Raises:
      ConfigError: as `find_place`. In a job of several processes, nothing that is raised inside the block gets out.
    """
    place = find_place(config, os.environ)
    if place is not None:
        _join(place, config)
    group = make_group(config)
    try:
        yield group
        group.close()
    except BaseException as error:
        if group.count == 1:
            raise
        # A collective that breaks off is another process's failure, where that is known.
        is_theirs = group.failure and not isinstance(error, (PeerError, SystemExit))
        _leave(group, PeerError(group.failure) if is_theirs else error)


def _join(place: Place, config: DistributedConfig) -> None:
    # XLA:CPU has no collectives across processes without it; other platforms do not look at it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    kwargs: dict[str, Any] = dataclasses.asdict(place)
    jax.distributed.initialize(
        **kwargs,
        initialization_timeout=config.initialization_timeout_s,
        # The job's own watch is to speak first, in words.
        heartbeat_timeout_seconds=int(config.heartbeat_timeout_s) + 60,
        # All of a job is known: every device of this machine is this process's, also under a launcher.
        cluster_detection_method="deactivate" if place.is_whole else None,
    )
    logging.info("process %d of %d", jax.process_index(), jax.process_count())


def _leave(group: Group, error: BaseException) -> None:
    """Ends this process with the error's exit code; the others hear of it, unless it was they who failed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it is ending already
    cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
    code, words = EXIT_FAILED, f"{type(cause).__name__}: {cause}"
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
    elif isinstance(error, ConfigError):
        code = EXIT_BAD_INPUT
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, (KeyboardInterrupt, FetchError, PeerError)):
        words = "stopped" if isinstance(error, KeyboardInterrupt) else str(error)
        print(f"error: {words}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    group.fail("" if isinstance(cause, PeerError) else words)
    logging.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
