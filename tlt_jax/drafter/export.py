"""Drafters in and out, in the layouts that SGLang and vLLM load.

Layout of a directory: `config.json` and `model.safetensors`.

    eagle   fc.weight  layers.0.self_attn.{q,k,v,o}_proj.{weight,bias}  layers.0.post_attention_layernorm.weight
            layers.0.mlp.{gate,up,down}_proj.weight
    eagle3  the same under `midlayer.` instead of `layers.0.`, with midlayer.{input_layernorm,hidden_norm}.weight, and
            norm.weight  lm_head.weight  d2t (i64 offsets)  t2d (bool over the target's vocabulary)

Embedding, and in eagle the head, are not in the file: both servers take the target's. What differs by server:
  - the names of the eagle architecture. SGLang has one class for biased attention (Qwen2's) and one for unbiased;
    vLLM has Llama's alone, whose `qkv_bias` says that q, k and v have one.
  - SGLang's eagle projection has a bias whether the drafter has or not, and would leave it as it was initialised: a
    drafter without one is written with zeros. vLLM's has none, and refuses the tensor.
  - how eagle3's layers are counted: SGLang by output (`eagle_config`), vLLM by input (top level). Both are written.
eagle3 is one layout for both. A reduced vocabulary is part of it; in eagle it is ours alone and stays in a file of its
own, `draft_vocab.npy`, which servers ignore: they then propose from the whole vocabulary.

References:
  SGLang `models/{llama_eagle,qwen2_eagle,llama_eagle3}.py`; vLLM `models/{llama_eagle,llama_eagle3}.py`; the released
  checkpoints of EAGLE and SpecForge.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from tlt_jax.drafter import vocab
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.model import check_map, draft_param_shapes
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.hf import flatten, open_tensors, read_json, read_tensor
from tlt_jax.models.hf_export import MAX_SHARD_BYTES, TensorSpec, new_directory, write_json, write_tensors
from tlt_jax.types import Params

SERVERS = ("sglang", "vllm")
VOCAB_FILE = "draft_vocab.npy"

_TOP = {"fc": "fc", "final_norm": "norm", "head": "lm_head"}
_LAYER = {
    "embed_norm": "input_layernorm",
    "hidden_norm": "hidden_norm",
    "attn/q": "self_attn.q_proj",
    "attn/k": "self_attn.k_proj",
    "attn/v": "self_attn.v_proj",
    "attn/o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
# Tensors of released checkpoints that are not ours to read: copies of the target's, and what follows from d2t.
_IGNORED = ("embed_tokens.weight", "t2d", "rotary_emb.inv_freq")


def tensor_name(path: str, form: str) -> str:
    """The file's name of a parameter: `layer/attn/q/weight` -> `layers.0.self_attn.q_proj.weight`."""
    module, leaf = path.rsplit("/", 1)
    kind = "bias" if leaf == "bias" else "weight"
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    layer = "layers.0" if form == "eagle" else "midlayer"
    return f"{layer}.{_LAYER[module.removeprefix('layer/')]}.{kind}"


def save_drafter(
    out_dir: str | pathlib.Path,
    config: DraftConfig,
    draft_params: Params,
    d2t: np.ndarray | None = None,
    *,
    server: str = "sglang",
    dtype: str | None = None,
) -> None:
    """Writes a drafter for `server`; parameters in any sharding of this process.

    Args:
      out_dir: directory to create; must not exist yet.
      config: of the drafter.
      draft_params: the trainable tree.
      d2t: map of a reduced vocabulary.
      server: "sglang" or "vllm".
      dtype: of the weights in the file; None keeps that of each parameter.

    Raises:
      ValueError: an existing directory, a missing map, or a drafter that the server's classes cannot hold.
    """
    check_map(config, d2t)
    if d2t is not None:
        vocab.check_fits(config, d2t)
    fields = to_hf(config, server)
    arrays = {tensor_name(path, config.form): x for path, x in flatten(draft_params).items()}
    if config.form == "eagle" and server == "sglang" and not config.fc_bias:
        arrays["fc.bias"] = np.zeros(config.target.hidden_size, arrays["fc.weight"].dtype)
    types = {name: str(jnp.dtype(dtype or x.dtype)) for name, x in arrays.items()}
    if config.form == "eagle3":
        offsets = np.zeros(config.vocab_size, np.int64) if d2t is None else np.asarray(d2t, np.int64)
        arrays |= {"d2t": offsets, "t2d": vocab.target_mask(offsets, config.target.vocab_size)}
        types |= {"d2t": "int64", "t2d": "bool"}
    specs = [TensorSpec(name, tuple(x.shape), types[name]) for name, x in arrays.items()]
    with new_directory(out_dir) as tmp_dir:
        write_tensors(tmp_dir, specs, (np.asarray(x) for x in arrays.values()), MAX_SHARD_BYTES)
        # Both spellings: transformers 5 reads `dtype`, everything older `torch_dtype`.
        write_json(tmp_dir / "config.json", fields | {"dtype": types["fc.weight"], "torch_dtype": types["fc.weight"]})
        if config.form == "eagle" and d2t is not None:
            np.save(tmp_dir / VOCAB_FILE, np.asarray(d2t, np.int32))


def to_hf(config: DraftConfig, server: str) -> dict[str, Any]:
    """`config.json` of a drafter as `server` expects it."""
    if server not in SERVERS:
        raise ValueError(f"drafter export: got server {server!r}, expected one of {', '.join(SERVERS)}")
    layer = config.layer
    only_qkv = layer.attention_bias and not layer.output_bias
    if layer.output_bias and not layer.attention_bias:
        raise ValueError("drafter export: got a bias on the output projection alone; no server has a class for that")
    is_qwen = only_qkv and server == "sglang"
    fields = dataclasses.replace(layer, model_type="qwen2" if is_qwen else "llama").to_hf()
    fields |= {"vocab_size": config.target.vocab_size, "num_hidden_layers": 1}
    if config.form == "eagle3":
        return fields | _eagle3_fields(config)
    if server == "sglang":
        return fields | {"architectures": ["Qwen2ForCausalLMEagle" if is_qwen else "LlamaForCausalLMEagle"]}
    if config.fc_bias:
        raise ValueError("drafter export: got a bias on the input projection, which vLLM's EAGLE class does not have")
    if only_qkv:
        fields |= {"attention_bias": False, "qkv_bias": True}
    return fields | {"architectures": ["EagleLlamaForCausalLM"]}


def _eagle3_fields(config: DraftConfig) -> dict[str, Any]:
    if config.fc_bias or config.layer.attention_bias:
        raise ValueError("drafter export: got biases in an eagle3 drafter, which no server's class has")
    outputs = list(config.feature_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,  # tied would mean the embedding as head
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target.hidden_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in outputs],
    }


def load_drafter(
    model_dir: str | pathlib.Path, target: ModelConfig, *, param_dtype: str | None = "float32"
) -> tuple[DraftConfig, Params, np.ndarray | None]:
    """Reads what `save_drafter` wrote for either server, and released EAGLE and EAGLE-3 checkpoints in safetensors.

    Args:
      model_dir: directory with `config.json` and safetensors.
      target: the model it drafts for; its embedding and head are used whatever copies the file may hold.
      param_dtype: dtype of the parameters; None keeps that of the file.

    Returns:
      Configuration, trainable parameters, and the map i32 of a reduced vocabulary or None.

    Raises:
      ValueError: names or shapes that are not those of a one-layer drafter of `target`.
    """
    model_dir = pathlib.Path(model_dir)
    fields, found = read_json(model_dir / "config.json"), open_tensors(model_dir)
    tensors = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    form = "eagle3" if any(name.endswith("hidden_norm.weight") for name in tensors) else "eagle"
    if form == "eagle3":  # some converters number the layer
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    d2t = _read_map(model_dir, tensors, target)
    config = _config_from(fields, tensors, form, target, d2t)
    # SGLang's projection has a bias in any case.
    ignored = (*_IGNORED, "d2t") + (("lm_head.weight",) if form == "eagle" else ())
    ignored += () if config.fc_bias else ("fc.bias",)
    shapes = {path: tuple(s.shape) for path, s in flatten(draft_param_shapes(config)).items()}
    names = {path: tensor_name(path, form) for path in shapes}
    _check_tensors({names[path]: shape for path, shape in shapes.items()}, tensors, ignored, model_dir)
    arrays = {}
    for path, name in names.items():
        x = read_tensor(tensors[name])
        arrays[path] = jnp.asarray(x if param_dtype is None else x.astype(jnp.dtype(param_dtype)))
    return config, traverse_util.unflatten_dict(arrays, sep="/"), d2t


def _read_map(model_dir: pathlib.Path, tensors: dict[str, Any], target: ModelConfig) -> np.ndarray | None:
    """Offsets i32 of a reduced vocabulary; None where the map is the identity or there is none."""
    if (model_dir / VOCAB_FILE).exists():
        return np.load(model_dir / VOCAB_FILE)
    if "d2t" not in tensors:
        return None
    d2t = np.asarray(tensors["d2t"][:]).astype(np.int32)
    return None if len(d2t) == target.vocab_size and not d2t.any() else d2t


def _config_from(
    fields: dict[str, Any], tensors: dict[str, Any], form: str, target: ModelConfig, d2t: np.ndarray | None
) -> DraftConfig:
    num_layers = fields.get("num_hidden_layers", 1)
    if num_layers != 1:
        raise ValueError(f"drafter import: got {num_layers} layers, expected a drafter of one")
    prefix = "layers.0" if form == "eagle" else "midlayer"
    biases = {
        "attention_bias": f"{prefix}.self_attn.q_proj.bias" in tensors,
        "output_bias": f"{prefix}.self_attn.o_proj.bias" in tensors,
    }
    kept = {name: getattr(target, name) for name in ("dtype", "platform", "num_valid_tokens", "tie_embeddings")}
    kept |= {"model_type": target.model_type, "qk_norm": False, "num_layers": 1}
    layer = ModelConfig.from_hf(fields | {"model_type": "llama"}, **biases, **kept)
    has_fc_bias = "fc.bias" in tensors and bool(np.any(np.asarray(tensors["fc.bias"][:]).astype(np.float32)))
    config = DraftConfig(
        target=target,
        form=form,
        feature_layers=_feature_layers(fields) if form == "eagle3" else (),
        draft_vocab_size=0 if d2t is None else len(d2t),
        fc_bias=has_fc_bias,
        layer=layer,
    )
    if d2t is not None:
        vocab.check_fits(config, d2t)
    usual = dataclasses.replace(config, layer=None)  # type: ignore[arg-type]  # filled in from the target
    return usual if _same_layer(usual.layer, layer) else config


def _same_layer(a: ModelConfig, b: ModelConfig) -> bool:
    names = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "rope_scaling", "rms_norm_eps")
    return all(getattr(a, name) == getattr(b, name) for name in (*names, "attention_bias", "output_bias"))


def _feature_layers(fields: dict[str, Any]) -> tuple[int, ...]:
    by_output = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if by_output:
        return tuple(by_output)
    return tuple(i - 1 for i in fields.get("eagle_aux_hidden_state_layer_ids") or ())


def _check_tensors(
    shapes: dict[str, tuple[int, ...]], tensors: dict[str, Any], ignored: tuple[str, ...], model_dir: pathlib.Path
) -> None:
    missing = sorted(set(shapes) - set(tensors))
    unused = sorted(name for name in set(tensors) - set(shapes) if not name.endswith(ignored))
    wrong = [
        f"{name}: got {tuple(tensors[name].get_shape())}, expected {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].get_shape()) != shape
    ]
    if missing or unused or wrong:
        raise ValueError(
            f"{model_dir}: not a one-layer drafter of this target: missing {missing or 'nothing'}, not used "
            f"{unused or 'nothing'}, of another shape {wrong or 'nothing'}; check the target model"
        )
