"""Writes a small Qwen2 with seeded random weights as a Hugging Face directory, for benchmarks.

    python -m benchmarks.peers.make_tiny DIR                 # 4 layers, 6.03 M parameters
    python -m benchmarks.peers.make_tiny DIR --layers=2 --hidden=32 --ffn=64 --heads=2 --kv-heads=1 --head-dim=16

Weights and biases are N(0, std = 0.02), norm scales 1: logits are near uniform and every product is a real one. No
tokenizer is written: benchmarks speak token ids. Needs numpy and safetensors only.
"""

import argparse
import dataclasses
import json
import pathlib

import numpy as np
from safetensors.numpy import save_file


@dataclasses.dataclass(frozen=True)
class TinySpec:
    """Shape of the model; the defaults give 6,033,664 parameters."""

    layers: int = 4
    hidden: int = 256
    ffn: int = 1024
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 8192
    max_positions: int = 4096
    seed: int = 0
    std: float = 0.02


def make_tensors(spec: TinySpec) -> dict[str, np.ndarray]:
    """Every tensor under its Hugging Face name, f32, weights [out, in]."""
    rng = np.random.default_rng(spec.seed)
    q_dim, kv_dim = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)}
    for i in range(spec.layers):
        layer = f"model.layers.{i}."
        for name, out_dim in (("q", q_dim), ("k", kv_dim), ("v", kv_dim)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (out_dim, spec.hidden)
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (out_dim,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (spec.hidden, q_dim)
        shapes[f"{layer}mlp.gate_proj.weight"] = (spec.ffn, spec.hidden)
        shapes[f"{layer}mlp.up_proj.weight"] = (spec.ffn, spec.hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (spec.hidden, spec.ffn)
    tensors = {name: rng.normal(0.0, spec.std, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = [f"model.layers.{i}.{n}_layernorm.weight" for i in range(spec.layers) for n in ("input", "post_attention")]
    return tensors | {name: np.ones(spec.hidden, np.float32) for name in (*norms, "model.norm.weight")}


def make_config(spec: TinySpec) -> dict[str, object]:
    """`config.json` of a tied Qwen2 without any end-of-sequence id: responses end at their length alone."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


def write_tiny(out_dir: str, spec: TinySpec = TinySpec()) -> int:
    """Writes the directory and returns the number of parameters."""
    tensors = make_tensors(spec)
    path = pathlib.Path(out_dir)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(make_config(spec), indent=1) + "\n", encoding="utf-8")
    return sum(tensor.size for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir")
    for field in dataclasses.fields(TinySpec):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    flags = vars(parser.parse_args())
    out_dir = flags.pop("out_dir")
    print(f"{out_dir}: {write_tiny(out_dir, TinySpec(**flags)):,} parameters")


if __name__ == "__main__":
    main()
