"""GGUF files in: dequantised and renamed into a Hugging Face directory, tokenizer included.

Life of `import_gguf(path, out_dir)`:
1. The metadata becomes a `ModelConfig`; Llama 3's frequency factors, which GGUF keeps as a tensor, become scaling.
2. Every tensor gets its HF name; what has no place is an error.
3. One tensor at a time is dequantised to f32, put into HF's row order and written.
4. `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` are rebuilt from the metadata.

Row order: for the `llama` architecture llama.cpp rotates neighbouring pairs, and stores query and key rows interleaved;
HF rotates half-split pairs. Qwen files keep HF's order.

References:
  The GGUF specification, and `LlamaModel.permute` of llama.cpp's `convert_hf_to_gguf.py`, inverted here.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from tlt_jax.models import gguf_tokenizer
from tlt_jax.models.config import ModelConfig, RopeScaling, rope_frequencies
from tlt_jax.models.hf import param_names
from tlt_jax.models.hf_export import MAX_SHARD_BYTES, TensorSpec, new_directory, write_config, write_json, write_tensors

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP_TENSORS = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
_LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "attn/q": "attn_q",
    "attn/k": "attn_k",
    "attn/v": "attn_v",
    "attn/o": "attn_output",
    "attn/q_norm": "attn_q_norm",
    "attn/k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp/gate": "ffn_gate",
    "mlp/up": "ffn_up",
    "mlp/down": "ffn_down",
}
_FREQUENCY_FACTORS = "rope_freqs.weight"
# Llama 3.1 to 3.3 differ in the factor alone.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def import_gguf(path: str | pathlib.Path, out_dir: str | pathlib.Path, dtype: str = "float32") -> ModelConfig:
    """Writes the HF directory of a GGUF file.

    Args:
      path: a GGUF file of a `llama`, `qwen2` or `qwen3` model with a byte-level BPE tokenizer, quantised or not.
      out_dir: directory to create; must not exist yet.
      dtype: "float32" (every dequantised value exactly) or "bfloat16".

    Returns:
      The configuration, as `load_hf(out_dir)` will read it.

    Raises:
      ValueError: not a GGUF file, or an architecture, tensor, scaling or tokenizer that is not supported.
    """
    reader = _open(pathlib.Path(path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _read_config(reader, tensors)
    places = _match(config, tensors)
    specs = [TensorSpec(name, shape, dtype) for name, shape in param_names(config).values()]
    tokenizer, tokenizer_config = gguf_tokenizer.rebuild(field_getter(reader), config)
    with new_directory(out_dir) as tmp_dir:
        write_tensors(tmp_dir, specs, _arrays(config, places), MAX_SHARD_BYTES)
        write_config(tmp_dir, config, dtype)
        write_json(tmp_dir / "tokenizer.json", tokenizer, indent=None)
        write_json(tmp_dir / "tokenizer_config.json", tokenizer_config)
    return config


def gguf_name(path: str) -> str:
    """The GGUF tensor name of a parameter: `layers_0/attn/q/weight` -> `blk.0.attn_q.weight`."""
    module, leaf = path.rsplit("/", 1)
    kind = "bias" if leaf == "bias" else "weight"
    if module in _TOP_TENSORS:
        return f"{_TOP_TENSORS[module]}.{kind}"
    layer, module = module.split("/", 1)
    return f"blk.{layer.removeprefix('layers_')}.{_LAYER_TENSORS[module]}.{kind}"


def field_getter(reader: GGUFReader) -> Callable[..., Any]:
    """`get(key, default)` over a file's metadata."""

    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    return get


def interleaved_to_half_split(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row 2i + s of each head, of `num_heads` equal heads, becomes row i + s * head_dim / 2."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def same_matrix(a: ReaderTensor, b: ReaderTensor, num_rows: int = 4096) -> bool:
    """True where two tensors are quantisations of one matrix: their difference is small beside them.

    The coarsest quantisation in use (2 bits) is off by a third in norm, unrelated matrices by a factor of 1.4.
    """
    if tuple(a.shape) != tuple(b.shape):
        return False
    difference = norm = 0.0
    for start in range(0, len(a.data), num_rows):
        x = dequantize(a.data[start : start + num_rows], a.tensor_type)
        y = dequantize(b.data[start : start + num_rows], b.tensor_type)
        difference += float(np.square(x - y, dtype=np.float64).sum())
        norm += float(np.square(y, dtype=np.float64).sum())
    return difference < 0.25 * norm


def _open(path: pathlib.Path) -> GGUFReader:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a GGUF file")
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path}: got a file that starts with {magic!r}, expected a GGUF file (b'GGUF')")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError) as error:  # the reader maps what is not there
        raise ValueError(f"{path}: not a complete GGUF file ({error}); copy or download it again") from error


def _read_config(reader: GGUFReader, tensors: dict[str, ReaderTensor]) -> ModelConfig:
    get = field_getter(reader)
    arch = get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"general.architecture: got {arch!r}, expected one of {', '.join(ARCHITECTURES)}")

    def need(key: str) -> Any:
        value = get(f"{arch}.{key}")
        if value is None:
            raise ValueError(f"GGUF metadata: got no {arch}.{key}, expected it in every {arch} file")
        return value

    num_heads, width = need("attention.head_count"), need("embedding_length")
    eos = (get("tokenizer.ggml.eos_token_id"), get("tokenizer.ggml.eot_token_id"))
    config = ModelConfig(
        vocab_size=len(get("tokenizer.ggml.tokens")),
        hidden_size=width,
        intermediate_size=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=num_heads,
        num_kv_heads=get(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=get(f"{arch}.attention.key_length", width // num_heads),
        rope_theta=_decimal(need("rope.freq_base")),
        rms_norm_eps=_decimal(need("attention.layer_norm_rms_epsilon")),
        tie_embeddings=_is_tied(tensors),
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=arch == "qwen3",
        max_position_embeddings=need("context_length"),
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        bos_token_id=get("tokenizer.ggml.bos_token_id"),
        pad_token_id=get("tokenizer.ggml.padding_token_id"),
        num_valid_tokens=gguf_tokenizer.num_tokens(get),
        model_type=arch,
    )
    return dataclasses.replace(config, rope_scaling=_read_scaling(get, arch, config, tensors))


def _is_tied(tensors: dict[str, ReaderTensor]) -> bool:
    head = tensors.get("output.weight")
    return head is None or same_matrix(tensors["token_embd.weight"], head)


def _read_scaling(
    get: Callable[..., Any], arch: str, config: ModelConfig, tensors: dict[str, ReaderTensor]
) -> RopeScaling | None:
    """Rope scaling from its metadata (linear, yarn) or from the tensor of factors (llama3)."""
    kind = get(f"{arch}.rope.scaling.type", "none")
    if _FREQUENCY_FACTORS in tensors:
        return _llama3_scaling(np.asarray(tensors[_FREQUENCY_FACTORS].data, np.float32), config)
    if kind == "none":
        return None
    factor = get(f"{arch}.rope.scaling.factor")
    if kind not in ("linear", "yarn") or factor is None:
        raise ValueError(
            f"{arch}.rope.scaling: got type {kind!r}, factor {factor}; expected linear or yarn with a factor"
        )
    if kind == "linear":
        return RopeScaling(kind=kind, factor=_decimal(factor))
    context = get(f"{arch}.rope.scaling.original_context_length", config.max_position_embeddings)
    return RopeScaling(kind=kind, factor=_decimal(factor), original_max_position_embeddings=context)


def _llama3_scaling(factors: np.ndarray, config: ModelConfig) -> RopeScaling:
    """The scaling whose frequencies are those of `factors` (plain frequency / scaled frequency, f32[H/2])."""
    scaling = RopeScaling(kind="llama3", factor=_decimal(factors.max()), **_LLAMA3_SCALING)
    plain, _ = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    scaled, _ = rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-3):
        raise ValueError(
            f"{_FREQUENCY_FACTORS}: got factors {factors.min():g} to {factors.max():g} that are not those of Llama 3.x "
            f"({_LLAMA3_SCALING}); convert the model from its Hugging Face directory instead"
        )
    return scaling


def _match(config: ModelConfig, tensors: dict[str, ReaderTensor]) -> dict[str, ReaderTensor]:
    """Parameter path -> GGUF tensor; both leftovers are errors, as are shapes."""
    expected = {path: (gguf_name(path), shape) for path, (_, shape) in param_names(config).items()}
    extra = set(tensors) - {name for name, _ in expected.values()} - {_FREQUENCY_FACTORS, "output.weight"}
    missing = [name for name, _ in expected.values() if name not in tensors]
    if extra or missing:
        raise ValueError(
            f"GGUF tensors and parameters do not match: missing from the file {missing[:12]}; in the file without a "
            f"parameter {sorted(extra)[:12]}; expected a dense {config.model_type} decoder"
        )
    places = {path: tensors[name] for path, (name, _) in expected.items()}
    wrong = [
        f"{tensor.name}: got {_shape(tensor)}, expected {expected[path][1]}"
        for path, tensor in places.items()
        if _shape(tensor) != expected[path][1]
    ]
    if wrong:
        raise ValueError(f"GGUF tensor shapes differ from the metadata: {', '.join(wrong[:12])}")
    if config.tie_embeddings and "output.weight" in tensors:
        # One matrix quantised twice: the finer one serves as embedding and as head.
        places["embed/weight"] = max(places["embed/weight"], tensors["output.weight"], key=lambda t: int(t.n_bytes))
    return places


def _arrays(config: ModelConfig, places: dict[str, ReaderTensor]) -> Iterator[np.ndarray]:
    """Dequantised arrays in HF's row order, one at a time."""
    num_heads = {"q": config.num_heads, "k": config.num_kv_heads}
    for path, tensor in places.items():
        array = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
        module = path.split("/")[-2]
        if config.model_type == "llama" and module in num_heads:
            array = interleaved_to_half_split(array, num_heads[module])
        yield array.astype(np.float32, copy=False)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Row-major shape: GGUF lists the fastest dimension first."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _decimal(value: Any) -> float:
    """An f32 of the metadata as the decimal number it was made from: 9.99999974e-06 -> 1e-05."""
    return float(f"{float(value):.6g}")
