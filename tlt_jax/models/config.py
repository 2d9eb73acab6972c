"""Decoder configuration, read from and written to Hugging Face `config.json`.

One frozen dataclass covers the Llama 3.x, Qwen2 / Qwen2.5, Qwen3 and SmolLM2 families. Whatever the
decoder does not implement (another `model_type`, another rope type, a sliding window in use, biased MLPs)
is refused here, before any weight is read or any program compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_LLAMA3_KEYS = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
_YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": _LLAMA3_KEYS,
    "yarn": ("factor", "original_max_position_embeddings", *_YARN_KEYS),
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings, in Hugging Face's terms.

    `kind` is "linear", "llama3" or "yarn". `original_max_position_embeddings` is the context length
    before scaling; `low_freq_factor` / `high_freq_factor` belong to llama3, the rest to yarn.
    """

    kind: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one decoder; hashable, static under `jax.jit`.

    `num_valid_tokens` is the tokenizer's size where the embedding has more rows than that; logits of
    the surplus ids are masked. `dtype` is the compute dtype of activations; norms, softmax and logits are
    always f32. `platform` picks the kernels ("" means the default backend).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on o
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 32768
    num_valid_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    model_type: str = "llama"
    dtype: str = "float32"
    platform: str = ""

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model: got {self.num_heads} query heads and {self.num_kv_heads} key/value heads, "
                "expected the first to be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ValueError(f"model: got head_dim {self.head_dim}, expected an even number (rotary pairs)")
        if self.num_valid_tokens is not None and not 0 < self.num_valid_tokens <= self.vocab_size:
            raise ValueError(
                f"model: got a tokenizer of {self.num_valid_tokens} ids for {self.vocab_size} embedding rows; "
                "expected at most as many ids as rows: use the tokenizer that belongs to this model"
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, **overrides: Any
    ) -> ModelConfig:
        """Parses a Hugging Face `config.json` (and `generation_config.json` for the stop ids).

        Raises:
          ValueError: on a model, rope type or attention pattern that the decoder does not implement, or on
            a missing key.
        """
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type: got {model_type!r}, expected one of {', '.join(MODEL_TYPES)}")
        _refuse_unsupported(config)
        theta, scaling = _read_rope(config)
        num_heads = _need(config, "num_attention_heads")
        hidden_size = _need(config, "hidden_size")
        biased = bool(config.get("attention_bias", False))
        fields: dict[str, Any] = {
            "vocab_size": _need(config, "vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": _need(config, "intermediate_size"),
            "num_layers": _need(config, "num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": config.get("num_key_value_heads") or num_heads,
            "head_dim": config.get("head_dim") or hidden_size // num_heads,
            "rope_theta": theta,
            "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
            "attention_bias": True if model_type == "qwen2" else biased,
            "output_bias": False if model_type == "qwen2" else biased,
            "qk_norm": model_type == "qwen3",
            "rope_scaling": scaling,
            "max_position_embeddings": config.get("max_position_embeddings", 32768),
            "eos_token_ids": _token_ids((generation_config or {}).get("eos_token_id"), config.get("eos_token_id")),
            "bos_token_id": config.get("bos_token_id"),
            "pad_token_id": config.get("pad_token_id"),
            "model_type": model_type,
        }
        fields.update(overrides)
        return cls(**fields)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that `from_hf` reads back to an equal configuration."""
        eos = list(self.eos_token_ids)
        out: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": self.pad_token_id,
        }
        if self.model_type == "qwen2":
            out |= {"use_sliding_window": False, "sliding_window": None}
        else:
            out |= {"attention_bias": self.attention_bias}
        if self.model_type == "llama":
            out |= {"mlp_bias": False}
        if self.rope_scaling is not None:
            fields = dataclasses.asdict(self.rope_scaling)
            kept = {key: fields[key] for key in _ROPE_KEYS[self.rope_scaling.kind] if fields[key] is not None}
            out["rope_scaling"] = {"rope_type": self.rope_scaling.kind} | kept
        return out


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json: got no {key!r}; expected a Hugging Face decoder configuration with that key")
    return config[key]


def _token_ids(*candidates: int | list[int] | None) -> tuple[int, ...]:
    """The union of one or several ids from each candidate, in order."""
    found: list[int] = []
    for ids in candidates:
        for i in [ids] if isinstance(ids, int) else ids or []:
            if i not in found:
                found.append(i)
    return tuple(found)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    windowed = config.get("use_sliding_window", config.get("sliding_window") is not None)
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if (windowed and config.get("sliding_window")) or layer_types:
        raise ValueError(
            f"sliding window: got window {config.get('sliding_window')} and layer types {sorted(layer_types)}, "
            "expected full attention in every layer; this decoder has no windowed attention"
        )
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias: got true, expected false; biased MLP projections are not implemented")
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ValueError(f"hidden_act: got {act!r}, expected 'silu'")


def _read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rope base and scaling from the old place (top level) or the new one (`rope_parameters`)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("rope_theta: got none at the top level nor in rope_parameters; expected a number, as 10000.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type: got {kind!r}, expected one of {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return float(theta), None
    if "factor" not in rope:
        raise ValueError(f"rope_scaling: got type {kind!r} without 'factor', expected a factor > 1")
    known = {f.name for f in dataclasses.fields(RopeScaling)} - {"kind"}
    given = {k: v for k, v in rope.items() if k in known and v is not None}
    if kind != "linear":
        given.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return float(theta), RopeScaling(kind=kind, **given)


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies f32[H/2] of the rotary pairs, and the factor on cos and sin.

    References:
      Llama 3.1 scaling and YaRN (arXiv 2309.00071), in the form of transformers' `modeling_rope_utils`.
    """
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**half
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq.astype(np.float32), 1.0
    if scaling.kind == "linear":
        return (inv_freq / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(inv_freq, scaling).astype(np.float32), 1.0
    return _yarn_frequencies(inv_freq, scaling, config).astype(np.float32), _yarn_attention_factor(scaling)


def _llama3_frequencies(inv_freq: np.ndarray, s: RopeScaling) -> np.ndarray:
    context = s.original_max_position_embeddings
    assert context is not None
    turns = context * inv_freq / (2 * math.pi)
    smooth = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return (1 - smooth) * inv_freq / s.factor + smooth * inv_freq


def _yarn_frequencies(inv_freq: np.ndarray, s: RopeScaling, config: ModelConfig) -> np.ndarray:
    context, dim = s.original_max_position_embeddings, config.head_dim
    assert context is not None

    def pair_of(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair_of(s.beta_fast), pair_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return inv_freq / s.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(s: RopeScaling) -> float:
    if s.attention_factor is not None:
        return s.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0

    if s.mscale and s.mscale_all_dim:
        return mscale(s.mscale) / mscale(s.mscale_all_dim)
    return mscale(1.0)
