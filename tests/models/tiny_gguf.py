"""Writes tiny GGUF files, as llama.cpp's converter lays them out."""

import gguf
import numpy as np

from tlt_jax.models import gguf as gguf_in, hf

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789.,!Ġ"
TOKENS = [*ALPHABET, "he", "ll", "hell", "hello"]
MERGES = ["h e", "l l", "he ll", "hell o"]


def interleave(rows, num_heads):
    """HF's row order to GGUF's for the llama architecture, one row at a time."""
    head_dim = len(rows) // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for half in (0, 1):
                out[head * head_dim + 2 * i + half] = rows[head * head_dim + i + half * head_dim // 2]
    return out


def write_metadata(writer, config, num_tokens):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "llama3":
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
        writer.add_rope_scaling_factor(scaling.factor)
        if scaling.original_max_position_embeddings:
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
    tokens = [*TOKENS, *(f"<s{i}>" for i in range(num_tokens - len(TOKENS)))]
    types = [1] * len(TOKENS) + [3] * (num_tokens - len(TOKENS)) + [5] * (config.vocab_size - num_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(num_tokens, config.vocab_size))])
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_ids[0])
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def write_gguf(path, config, params, *, num_tokens=90, extra=None, quantise=None):
    """A GGUF file of `params`; `extra` adds or replaces tensors, `quantise` gives types by name."""
    writer = gguf.GGUFWriter(path, config.model_type)
    write_metadata(writer, config, num_tokens)
    tensors = {gguf_in.gguf_name(p): x for p, x in hf.flatten(params).items()} | (extra or {})
    for name, array in tensors.items():
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
        if config.model_type == "llama" and heads:
            array = interleave(array, heads)
        kind = (quantise or {}).get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
