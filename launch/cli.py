"""What all commands share: flags, exit codes, the JSON result.

Exit codes: 0 done; 1 the run failed; 2 bad flags, configuration or input, found before anything was compiled.
"""

from __future__ import annotations

import contextlib
import json
import logging as std_logging
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags, logging

from launch.config import CONFIG, OVERRIDE, ConfigError, exit_with, load_config, parse_flags
from launch.run_config import SCHEMA, RunConfig, make_run_config

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

_JSON = flags.DEFINE_string("json", "", "Also write the result object to this file.")


@contextlib.contextmanager
def checking_input() -> Iterator[None]:
    """Inside, ValueError and OSError mean bad input."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def read_run_config() -> RunConfig:
    """The checked configuration of `--config` and its overrides."""
    return make_run_config(load_config(CONFIG.value, OVERRIDE.value, SCHEMA))


def run(main: Callable[[], dict[str, Any] | None]) -> None:
    """Parses flags, runs `main`, prints its result as the last line of stdout, and exits."""
    rest = parse_flags(sys.argv)
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(is_for_the_user)
    try:
        if len(rest) > 1:
            raise ConfigError(f"command line: got stray arguments {rest[1:]}, expected flags as --name=value")
        result = main()
    except ConfigError as error:
        exit_with(error, EXIT_BAD_INPUT)
    write_result(result, _JSON.value)


def is_for_the_user(record: std_logging.LogRecord) -> bool:
    """False for what Orbax notes about its own work, some forty lines a checkpoint; its warnings stay."""
    return record.levelno > std_logging.INFO or "/orbax/checkpoint/" not in pathlib.Path(record.pathname).as_posix()


def write_result(result: dict[str, Any] | None, path: str) -> None:
    """Prints one JSON line, and writes it to `path` where there is one."""
    if result is None:
        return
    line = json.dumps(result)
    if path:
        pathlib.Path(path).write_text(line + "\n")
    print(line, flush=True)
