"""Flags of the commands that keep a workdir."""

from __future__ import annotations

import sys

from absl import flags

WORKDIR = flags.DEFINE_string("workdir", "", "Directory of the run; default: one under runs/, named by the config.")
PROGRESS = flags.DEFINE_bool("progress", sys.stderr.isatty(), "Show progress bars.")
