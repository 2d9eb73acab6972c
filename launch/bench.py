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


def _read_run(args: argparse.Namespace) -> Any:
    from launch.config import load_config
    from launch.run_config import SCHEMA, make_run_config

    overrides = [o.removeprefix("--").removeprefix("config.") for o in args.overrides]
    return make_run_config(load_config(args.config, overrides, SCHEMA))


def _strategies(args: argparse.Namespace) -> list[Any]:
    from tlt_jax.strategy import parse

    return [parse(name.strip()) for name in args.strategies.split(",") if name.strip()]


def _spec(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import speculation

    batches = [int(b) for b in args.batches.split(",")]
    return speculation.spec(_read_run(args), batches, args.repeats, _strategies(args))


def _bandit(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import speculation

    return speculation.bandit(_read_run(args), args.live, args.repeats, _strategies(args))


def _lossless(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import speculation

    temperatures = [float(t) for t in args.temperatures.split(",")]
    return speculation.lossless_check(_read_run(args), args.tokens, temperatures)


def _accept(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import speculation

    temperatures = [float(t) for t in args.temperatures.split(",")]
    return speculation.accept(_read_run(args), temperatures, _strategies(args), args.requests)


def _executables(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import speculation

    return speculation.executables(_read_run(args))


def _e2e(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import e2e

    return e2e.e2e(
        args.config,
        [o.removeprefix("--").removeprefix("config.") for o in args.overrides],
        regime=args.regime,
        processes=args.processes,
        steps=args.steps,
        warmup=args.warmup,
        variants=args.variants,
        cold=args.cold,
        warm=args.warm,
        rehearse=args.rehearse,
    )


def _drafter(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import drafter

    return drafter.drafter(_read_run(args), args.sequences, args.prompt_len, args.repeats)


def _checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import draft_checkpoint

    return draft_checkpoint.checkpoint(_read_run(args), args.repeats, args.directory)


def _losses(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import draft_losses

    names = [name.strip() for name in args.losses.split(",")]
    return draft_losses.losses(_read_run(args), names, args.steps, args.prompts, args.looks)


BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "rollout": _rollout,
    "train": _train,
    "spec": _spec,
    "bandit": _bandit,
    "executables": _executables,
    "accept": _accept,
    "lossless": _lossless,
    "e2e": _e2e,
    "drafter": _drafter,
    "checkpoint": _checkpoint,
    "losses": _losses,
}
PEER_BENCHMARKS = ("rollout", "train")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.bench", description=__doc__.splitlines()[0] if __doc__ else None)
    names = parser.add_subparsers(dest="name", required=True)
    for name in BENCHMARKS:
        sub = names.add_parser(name)
        sub.add_argument("--json", default="", help="also write the result here")
        sub.add_argument("--repeats", type=int, default=5)
        sub.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
        if name in PEER_BENCHMARKS:
            sub.add_argument("--model", default="tiny", help="Hugging Face directory, or 'tiny'")
            sub.add_argument("--peers", default="", help="comma-separated; default all that are installed")
        else:
            sub.add_argument("--config", default="configs/quickstart.py", help="model, task, drafter and bandit")
            sub.add_argument("overrides", nargs="*", help="config.section.field=value")
        if name == "accept":
            sub.add_argument("--temperatures", default="0.6,0.9,1.0")
            sub.add_argument("--strategies", default="chain_3,chain_5,3_2_8,4_2_8,6_4_16,8_4_32")
            sub.add_argument("--requests", type=int, default=64)
        if name in ("spec", "bandit"):
            sub.add_argument("--strategies", default="chain_3,chain_5,chain_7,4_2_8,ngram_3", help="fixed ones to show")
        if name == "spec":
            sub.add_argument("--batches", default="1,2,4,8,16", help="live batches")
        if name == "lossless":
            sub.add_argument("--tokens", type=int, default=20_000, help="compared in all")
            sub.add_argument("--temperatures", default="0,0.6,1.0")
        if name == "bandit":
            sub.add_argument("--live", type=int, default=16, help="responses at the start")
        if name == "e2e":
            sub.add_argument("--regime", default="law", help="natural or law")
            sub.add_argument("--processes", type=int, default=2)
            sub.add_argument("--steps", type=int, default=6)
            sub.add_argument("--warmup", type=int, default=1, help="first steps that no time is taken of")
            sub.add_argument("--variants", default="plain,ngram,tlt", help="also frozen and tlt_warm")
            sub.add_argument("--cold", default="", help="drafter that tlt and frozen start from; default random")
            sub.add_argument("--warm", default="", help="drafter that tlt_warm starts from")
            sub.add_argument("--rehearse", action=argparse.BooleanOptionalAction, default=True)
        if name == "drafter":
            sub.add_argument("--sequences", type=int, default=64, help="trained on in each pass")
            sub.add_argument("--prompt-len", type=int, default=32)
        if name == "checkpoint":
            sub.add_argument("--directory", default="", help="to write in; default the system's temporary one")
        if name == "losses":
            sub.add_argument("--losses", default="soft_ce,tv,lk,log_overlap,coupling")
            sub.add_argument("--steps", type=int, default=100, help="optimizer steps with each")
            sub.add_argument("--prompts", type=int, default=64, help="of the task, answered once for all")
            sub.add_argument("--looks", type=int, default=4, help="measurements on the way")
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
