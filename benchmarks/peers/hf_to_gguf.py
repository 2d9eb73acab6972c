# pyright: reportMissingImports=false
"""A Hugging Face directory (Qwen2 or plain Llama) as one GGUF file of the same weights, for llama.cpp.

No tokenizer is written (`tokenizer.ggml.model` is "none"): benchmarks speak token ids. Norms and biases stay f32.
llama.cpp rotates interleaved pairs in its Llama architecture, so q and k rows are permuted there; its Qwen2 rotates
halves, as Hugging Face files do.
"""

import glob
import json
import os
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from benchmarks.peers.job import JobError

WEIGHT_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(model_dir: str, out_path: str, weights: str) -> None:
    """Writes `out_path`.

    Raises:
      JobError: an architecture, rope scaling or weight type that is not handled.
    """
    if weights not in WEIGHT_TYPES:
        raise JobError(f"options.weights: got {weights!r}, expected one of {sorted(WEIGHT_TYPES)}; name one of them")
    with open(os.path.join(model_dir, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_plain_rope = rope.get("rope_type", rope.get("type", "default")) == "default"
    if config["model_type"] not in ("qwen2", "llama") or not is_plain_rope:
        got = f"{config['model_type']} with rope {rope}"
        raise JobError(f"model_dir: got {got}, expected qwen2 or llama without rope scaling; use another peer for it")
    writer = gguf.GGUFWriter(out_path, config["model_type"])
    _add_metadata(writer, config, config.get("rope_theta") or rope["rope_theta"])
    for path in sorted(glob.glob(os.path.join(model_dir, "*.safetensors"))):
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                _add_tensor(writer, config, name, tensors.get_tensor(name), WEIGHT_TYPES[weights])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], rope_theta: float) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _add_tensor(
    writer: gguf.GGUFWriter, config: dict[str, Any], name: str, tensor: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    base, suffix = name.rsplit(".", 1)
    if base == "lm_head" and config.get("tie_word_embeddings", False):
        return
    tensor = tensor.astype(np.float32)
    if base in _TOP_NAMES:
        target = f"{_TOP_NAMES[base]}.{suffix}"
    else:
        _, _, layer, rest = base.split(".", 3)
        target = f"blk.{layer}.{_NAMES[rest]}.{suffix}"
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(rest)
        if heads and config["model_type"] == "llama":
            pairs = tensor.reshape(config[heads], 2, _head_dim(config) // 2, *tensor.shape[1:])
            tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
    if tensor.ndim == 1:
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(target, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
