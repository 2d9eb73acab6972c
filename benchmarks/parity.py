"""Compares the decoder with transformers, on tiny random models of every family and on real ones.

    make parity                                     # tiny models; refreshes tests/golden/ where values moved
    .venv-parity/bin/python -m benchmarks.parity --model DIR [--model DIR2] [--json FILE]

Needs torch, which the project itself does not: `make parity` builds `.venv-parity` for it. For each tiny model: logits
on a ragged batch, with and without cache, within 2e-5 of transformers in f32; transformers loads the directory we
write without a missing or unexpected tensor; and we load what transformers writes, equal to the bit. What transformers
gave is kept in `tests/golden/parity.npz` and `parity.json`, which `make test` checks without torch. Exit code 1 if
anything is off.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
from typing import Any

import jax
import numpy as np
import torch
import transformers

from benchmarks import parity_models as tiny
from tlt_jax.models import hf

GOLDEN = pathlib.Path(__file__).parents[1] / "tests" / "golden"
TOLERANCE = 2e-5
REAL_TOLERANCE = 2e-3  # log-probs of a real model: sums over hundreds of terms in another order
_PROMPT = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in all?"


def compare_tiny(name: str, work_dir: pathlib.Path) -> tuple[dict[str, Any], np.ndarray, dict[str, Any]]:
    """One tiny model against transformers: (row of the report, transformers' logits, its `config.json`)."""
    config = tiny.FAMILIES[name]
    ours, theirs = work_dir / name, work_dir / f"{name}_theirs"
    tiny.write_model(ours, config)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        ours, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model.save_pretrained(theirs)
    loaded_config, params = hf.load_hf(ours)
    their_config, their_params = hf.load_hf(theirs)
    equal = jax.tree.map(lambda a, b: bool((a == b).all()), params, their_params)

    tokens, valid = tiny.ragged_batch(config), tiny.valid_mask()
    expected, expected_cached = _their_logits(model.eval(), tokens)
    uncached = np.abs(np.asarray(tiny.logits_uncached(params, config, tokens)) - expected)[valid]
    cached = np.abs(tiny.logits_cached(params, config, tokens) - expected_cached)[valid]
    row = {
        "model": name,
        "max_diff": float(uncached.max()),
        "max_diff_cached": float(cached.max()),
        "logits_std": float(expected[valid].std()),
        "unmatched": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])),
        "config_kept": loaded_config == config and their_config == config,
        "weights_kept": all(jax.tree.leaves(equal)),
    }
    close = max(row["max_diff"], row["max_diff_cached"]) < TOLERANCE
    row["ok"] = close and not row["unmatched"] and row["config_kept"] and row["weights_kept"]
    written = json.loads((theirs / "config.json").read_text())
    return row, np.where(valid[..., None], expected, 0.0).astype(np.float32), written


@torch.no_grad()
def _their_logits(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Transformers on the padded batch at once, and row by row with its cache."""
    ids, mask = torch.from_numpy(tokens).long(), torch.from_numpy(tiny.valid_mask()).long()
    uncached = model(ids, attention_mask=mask).logits.numpy()
    cached = np.zeros_like(uncached)
    for b, length in enumerate(tiny.LENGTHS):
        start = length - tiny.NUM_DECODED
        out = model(ids[b : b + 1, :start], use_cache=True)
        cached[b, :start] = out.logits[0].numpy()
        for t in range(start, length):
            out = model(ids[b : b + 1, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            cached[b, t] = out.logits[0, 0].numpy()
    return uncached, cached


@torch.no_grad()
def compare_real(model_dir: str) -> dict[str, Any]:
    """Largest difference of the log-probs of all tokens after each prefix of a text, for a model directory."""
    ids = transformers.AutoTokenizer.from_pretrained(model_dir)(_PROMPT)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config, params = hf.load_hf(model_dir)
    logits = model(torch.tensor([ids])).logits[..., : config.num_valid_tokens]
    theirs = torch.log_softmax(logits, -1).numpy()
    ours = jax.nn.log_softmax(tiny.logits_uncached(params, config, np.asarray([ids], np.int32)), -1)
    diff = float(np.abs(np.asarray(ours)[..., : config.num_valid_tokens] - theirs).max())
    return {"model": model_dir, "max_diff": diff, "ok": diff < REAL_TOLERANCE}


def update_golden(logits: dict[str, np.ndarray], configs: dict[str, Any]) -> bool:
    """Rewrites the golden files if a value is new or has moved; another machine's rounding is no move."""
    path = GOLDEN / "parity.npz"
    if path.exists():
        old = np.load(path)
        if set(old.files) == set(logits) and all(np.allclose(old[k], x, 0, TOLERANCE / 2) for k, x in logits.items()):
            return False
    GOLDEN.mkdir(exist_ok=True)
    np.savez_compressed(path, **logits)
    (GOLDEN / "parity.json").write_text(json.dumps({"configs": configs}, indent=1, sort_keys=True) + "\n")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", action="append", default=[], help="also compare this HF model directory")
    parser.add_argument("--json", help="write the report to this file")
    args = parser.parse_args()
    rows, logits, configs = [], {}, {}
    with tempfile.TemporaryDirectory() as work_dir:
        for name in tiny.FAMILIES:
            row, logits[name], configs[name] = compare_tiny(name, pathlib.Path(work_dir))
            rows.append(row)
            print(row, flush=True)
    for model_dir in args.model:
        rows.append(compare_real(model_dir))
        print(rows[-1], flush=True)
    ok = all(row["ok"] for row in rows)
    report = {"ok": ok, "torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}
    if ok:
        report["golden_updated"] = update_golden(logits, configs)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
