# pyright: reportMissingImports=false
"""A Hugging Face directory as tunix's Qwen2; runs in the `tunix` environment only.

Llama-architecture checkpoints (SmolLM2) are loaded as Qwen2 with zero q, k, v biases: the same function, and tunix's
own Llama ignores `rope_theta`.
"""

import json
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from tunix.models import safetensors_loader
from tunix.models.qwen2 import model as qwen2, params as qwen2_params

from benchmarks.peers.job import JobError


def load_model(model_dir: str, dtype: str, remat: bool = False) -> tuple[qwen2.Qwen2, qwen2.ModelConfig]:
    """Reads weights and configuration.

    Raises:
      JobError: an architecture other than Qwen2 and plain Llama.
    """
    with open(os.path.join(model_dir, "config.json"), encoding="utf-8") as file:
        raw = json.load(file)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    is_plain_rope = rope.get("rope_type", rope.get("type", "default")) == "default"
    if raw["model_type"] not in ("qwen2", "llama") or not is_plain_rope or raw.get("attention_bias", False):
        got = f"{raw['model_type']} with rope {rope}"
        raise JobError(f"model_dir: got {got}, expected qwen2, or llama without rope scaling; tunix cannot run it here")
    kind = jnp.dtype(dtype)
    config = qwen2.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        rope_theta=raw.get("rope_theta") or rope["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
        use_tied_embedding=raw.get("tie_word_embeddings", False),
        remat_config=qwen2.RematConfig.DECODER if remat else qwen2.RematConfig.NONE,
        dtype=kind,
        param_dtype=kind,
    )
    model = safetensors_loader.load_and_create_model(
        file_dir=model_dir,
        model_class=qwen2.Qwen2,
        config=config,
        key_mapping=qwen2_params._get_key_and_transform_mapping,
        preprocess_fn=None if raw["model_type"] == "qwen2" else lambda tensors: _add_zero_biases(tensors, config),
        dtype=kind,
    )
    return model, config


def _add_zero_biases(tensors: dict[str, Any], config: qwen2.ModelConfig) -> dict[str, Any]:
    widths = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    for i in range(config.num_layers):
        for name, num_heads in widths.items():
            tensors[f"layers.{i}.attn.{name}_bias"] = np.zeros(num_heads * config.head_dim, np.float32)
    return tensors
