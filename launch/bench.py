"""One benchmark: `python -m launch.bench NAME [--json=FILE] [...]`; the result is the last line of stdout.

`rollout` and `train` compare with the peers that `benchmarks/peers/setup.sh` has installed. Medians; compilation apart;
every figure says which machine it came from.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from launch.cli import EXIT_BAD_INPUT, write_result


def _rollout(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import throughput

    peers: list[str] = args.peers.split(",") if args.peers else list(throughput.ROLLOUT_PEERS)
    return throughput.rollout(args.scenario, args.model, peers, args.repeats, args.threads)


def _train(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import throughput

    peers: list[str] = args.peers.split(",") if args.peers else list(throughput.TRAIN_PEERS)
    return throughput.train(args.model, peers, args.repeats, args.threads, args.rows, args.length)


BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"rollout": _rollout, "train": _train}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.bench", description=__doc__.splitlines()[0] if __doc__ else None)
    names = parser.add_subparsers(dest="name", required=True)
    for name in BENCHMARKS:
        sub = names.add_parser(name)
        sub.add_argument("--json", default="", help="also write the result here")
        sub.add_argument("--model", default="tiny", help="Hugging Face directory, or 'tiny'")
        sub.add_argument("--peers", default="", help="comma-separated; default all that are installed")
        sub.add_argument("--repeats", type=int, default=5)
        sub.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
        if name == "rollout":
            sub.add_argument("--scenario", default="longtail", help="fixed, longtail, or decodeB for B rows")
        if name == "train":
            sub.add_argument("--rows", type=int, default=16)
            sub.add_argument("--length", type=int, default=256)
    args = parser.parse_args(argv)
    # Before jax makes its thread pool, so that all processes have the same number of CPUs.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    try:
        result = BENCHMARKS[args.name](args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    write_result(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
