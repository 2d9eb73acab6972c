"""What all commands share: flags, exit codes, the JSON result.

Exit codes: 0 done; 1 the run failed; 2 bad flags, configuration or input, found before anything was compiled.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

_JSON = flags.DEFINE_string("json", "", "Also write the result object to this file.")


class BadInputError(Exception):
    """What the user gave cannot be run; the message says what to change."""


@contextlib.contextmanager
def checking_input() -> Iterator[None]:
    """Inside, ValueError and OSError mean bad input."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise BadInputError(str(error)) from error


def define_config() -> flags.FlagHolder:
    """The `--config=FILE` flag with `--config.section.key=value` overrides."""
    return config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/quickstart.py.", lock_config=True)


def read_config(holder: flags.FlagHolder) -> Any:
    """The ConfigDict of `--config`.

    Raises:
      BadInputError: no flag, no such file, or a file that fails.
    """
    config = holder.value
    if config is None:
        raise BadInputError("--config: got none, expected a config file, e.g. --config=configs/quickstart.py")
    try:
        dict(config)
    except (TypeError, ValueError, AttributeError, KeyError, OSError, ImportError, SyntaxError) as error:
        raise BadInputError(f"--config: {error}") from error
    return config


def run(main: Callable[[], dict[str, Any] | None]) -> None:
    """Parses flags, runs `main`, prints its result as the last line of stdout, and exits."""
    try:
        rest = flags.FLAGS(sys.argv)
        if len(rest) > 1:
            raise BadInputError(f"command line: got stray arguments {rest[1:]}, expected flags as --name=value")
        logging.use_absl_handler()
        logging.set_verbosity(logging.INFO)
        result = main()
    except BadInputError as error:
        _fail(str(error), EXIT_BAD_INPUT)
    except (flags.Error, AttributeError, KeyError, TypeError) as error:
        if isinstance(error, flags.Error) or _is_from_flags(error):
            _fail(_flag_message(error), EXIT_BAD_INPUT)
        raise
    else:
        if result is not None:
            line = json.dumps(result)
            if _JSON.value:
                pathlib.Path(_JSON.value).write_text(line + "\n")
            print(line, flush=True)
        sys.exit(0)


def _is_from_flags(error: BaseException) -> bool:
    """Whether a config override or the config file raised it: ml_collections reports a bad key as AttributeError."""
    trace = error.__traceback__
    while trace is not None:
        if "ml_collections" in trace.tb_frame.f_code.co_filename:
            return True
        trace = trace.tb_next
    return False


def _flag_message(error: BaseException) -> str:
    """One short line; ml_collections lists every field of the section in between."""
    text = " ".join((error.args[0] if error.args and isinstance(error.args[0], str) else str(error)).split())
    near = re.search(r'Did you mean "([^"]+)" instead of "([^"]+)"', text)
    if near:
        return f"config: got an unknown key {near[2]!r}; the nearest known key is {near[1]!r}"
    return f"command line or config file: {text}"


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
