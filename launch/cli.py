"""What all commands share: flags, exit codes, the JSON result.

Exit codes: 0 done; 1 the run failed; 2 bad flags, configuration or input, found before anything was compiled.
"""

from __future__ import annotations

import contextlib
import json
import logging as std_logging
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import flags, logging

from launch.config import CONFIG, OVERRIDE, ConfigError, exit_with, load_config, parse_flags
from launch.fetch import FetchError
from launch.run_config import SCHEMA, RunConfig, make_run_config
from tlt_jax import files
from tlt_jax.rl.sandbox import SandboxUnavailableError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

_JSON = flags.DEFINE_string("json", "", "Also write the result object to this file.")


@contextlib.contextmanager
def checking_input() -> Iterator[None]:
    """Inside, ValueError and OSError mean bad input, and so does a reward that this machine cannot score safely."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError, SandboxUnavailableError) as error:
        raise ConfigError(str(error)) from error


def read_run_config() -> RunConfig:
    """The checked configuration of `--config` and its overrides."""
    return make_run_config(load_config(CONFIG.value, OVERRIDE.value, SCHEMA))


def run(main: Callable[[], dict[str, Any] | None]) -> None:
    """Parses flags, runs `main`, prints its result as the last line of stdout, and exits.

    SIGTERM acts as Ctrl-C does: KeyboardInterrupt in the main thread, so that what is open is closed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rest = parse_flags(sys.argv)
    keep_compiled_programs()
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(is_for_the_user)
    try:
        if len(rest) > 1:
            raise ConfigError(f"command line: got stray arguments {rest[1:]}, expected flags as --name=value")
        result = main()
        write_result(result, _JSON.value)
    except ConfigError as error:
        exit_with(error, EXIT_BAD_INPUT)
    except FetchError as error:
        exit_with(error, EXIT_FAILED)
    except KeyboardInterrupt:
        exit_with(RuntimeError("stopped"), EXIT_FAILED)


def keep_compiled_programs() -> None:
    """Sets JAX's cache on disk, so that the next process (a resumed run) loads what this one compiled.

    The directory is JAX_COMPILATION_CACHE_DIR, or one under the user's cache. By default JAX would leave small programs
    out, and a run has many.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(root / "tlt_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def is_for_the_user(record: std_logging.LogRecord) -> bool:
    """False for what Orbax notes about its own work, some forty lines a checkpoint; its warnings stay."""
    return record.levelno > std_logging.INFO or "/orbax/checkpoint/" not in pathlib.Path(record.pathname).as_posix()


def write_result(result: dict[str, Any] | None, path: str) -> None:
    """Prints one JSON line, and writes it to `path` where there is one. JSON has no NaN: such numbers are null."""
    if result is None:
        return
    is_odd = {key: isinstance(value, float) and not math.isfinite(value) for key, value in result.items()}
    line = json.dumps({key: None if is_odd[key] else value for key, value in result.items()})
    if path:
        files.write_text(path, line + "\n")
    print(line, flush=True)
