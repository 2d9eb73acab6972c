"""Hugging Face model directories in: names, checks, and tensors read straight into their shards.

Life of `load_hf(model_dir)`:
1. `load_config` reads `config.json`, `generation_config.json` (EOS ids) and `tokenizer.json` (how many vocabulary
   rows are tokens) into a `ModelConfig`.
2. `open_tensors` reads the index and the headers of the safetensors files: no weight yet.
3. `match_names` pairs every parameter with a tensor of the files; whatever is left over on either side is an error,
   as is a tensor of the wrong shape or of a quantised type.
4. Each parameter becomes a `jax.Array` in its target sharding. A device's slice is read from the file on its own, so a
   host reads what its devices hold, and the peak of host memory is one copy of the model plus one tensor.

Weights keep their layout `[out, in]` and query and key rows keep their order: HF files are made for rotate-half RoPE.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open

from tlt_jax.models import transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.sharding import path_str
from tlt_jax.types import Params

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_TOP_MODULES = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn/q": "self_attn.q_proj",
    "attn/k": "self_attn.k_proj",
    "attn/v": "self_attn.v_proj",
    "attn/o": "self_attn.o_proj",
    "attn/q_norm": "self_attn.q_norm",
    "attn/k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
# Where a directory keeps the decoder: the usual place, a bare decoder saved without its head, the text part of a
# multi-modal model in its old and its new spelling.
_PREFIXES: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: name.removeprefix("model."),
    lambda name: f"language_model.{name}",
    lambda name: name.replace("model.", "model.language_model.", 1),
)
# Types of safetensors files -> numpy (with ml_dtypes) names.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hf_name(path: str) -> str:
    """The HF tensor name of a parameter: `layers_0/attn/q/weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    module, leaf = path.rsplit("/", 1)
    kind = "bias" if leaf == "bias" else "weight"
    if module in _TOP_MODULES:
        return f"{_TOP_MODULES[module]}.{kind}"
    layer, module = module.split("/", 1)
    return f"model.layers.{layer.removeprefix('layers_')}.{_LAYER_MODULES[module]}.{kind}"


def param_names(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Parameter path -> (HF tensor name, shape), in the order of the forward pass."""
    shapes = flatten(transformer.param_shapes(config))

    def position(path: str) -> tuple[int, int]:
        head = path.split("/", 1)[0]
        return (1, int(head[7:])) if head.startswith("layers_") else (0 if head == "embed" else 2, 0)

    return {path: (hf_name(path), tuple(shapes[path].shape)) for path in sorted(shapes, key=position)}


def num_params(config: ModelConfig) -> int:
    """Number of parameters, a tied head counted once."""
    return sum(math.prod(shape) for _, shape in param_names(config).values())


def load_config(model_dir: str | pathlib.Path, **overrides: Any) -> ModelConfig:
    """Reads a model directory's configuration, without its weights.

    Args:
      model_dir: HF directory with `config.json`; `generation_config.json` and `tokenizer.json` are used where present.
      **overrides: fields of `ModelConfig` to set, e.g. `dtype="bfloat16"`.

    Raises:
      ValueError: a file is missing or not JSON, the architecture is not supported, the weights are quantised, or the
        tokenizer has ids that the embedding has no row for.
    """
    model_dir = pathlib.Path(model_dir)
    if not model_dir.is_dir():
        raise ValueError(f"model directory: got {model_dir}, which does not exist; expected a Hugging Face directory")
    fields = read_json(model_dir / "config.json")
    if fields.get("quantization_config"):
        raise ValueError(
            f"{model_dir}/config.json: got quantization_config {fields['quantization_config']}, expected plain "
            "weights; use the model's float or bfloat16 directory"
        )
    generation = model_dir / "generation_config.json"
    num_tokens = tokenizer_len(model_dir)
    if num_tokens is not None:
        overrides = {"num_valid_tokens": num_tokens, **overrides}
    return ModelConfig.from_hf(fields, read_json(generation) if generation.exists() else None, **overrides)


def tokenizer_len(model_dir: str | pathlib.Path) -> int | None:
    """Number of ids the tokenizer knows (largest id + 1), or None where there is no `tokenizer.json`.

    Embeddings are often padded beyond it; the rows above are no tokens and must never be sampled.
    """
    path = pathlib.Path(model_dir) / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = read_json(path)
    vocab = tokenizer.get("model", {}).get("vocab", {})
    # Unigram models list [piece, score] pairs, whose ids are their positions.
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return 1 + max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))], default=-1)


def load_hf(
    model_dir: str | pathlib.Path,
    *,
    param_dtype: Any = jnp.float32,
    shardings: Any = None,
    **overrides: Any,
) -> tuple[ModelConfig, Params]:
    """Loads an HF directory of safetensors.

    Args:
      model_dir: directory with `config.json` and one safetensors file or several with an index.
      param_dtype: dtype of the parameters; None keeps that of the files.
      shardings: tree like the parameters with a `jax.sharding.Sharding` each; None puts all on the default device.
      **overrides: fields of `ModelConfig`, e.g. `dtype="bfloat16"` for the activations.

    Returns:
      The configuration and the parameters (`transformer.param_shapes` describes them).

    Raises:
      ValueError: as `load_config`; a shard file is missing or damaged; names or shapes of the tensors do not fit the
        configuration. Raised before any weight is read.
    """
    config, tensors = open_model(model_dir, **overrides)
    flat_shardings = flatten(shardings)  # empty for None
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params = {
        path: _read_array(tensor, flat_shardings.get(path, default), param_dtype) for path, tensor in tensors.items()
    }
    return config, traverse_util.unflatten_dict(params, sep="/")


def open_model(model_dir: str | pathlib.Path, **overrides: Any) -> tuple[ModelConfig, dict[str, Any]]:
    """The checks of `load_hf` without its reading.

    Returns:
      The configuration, and parameter path -> safetensors slice, in the order of the forward pass.
    """
    model_dir = pathlib.Path(model_dir)
    config = load_config(model_dir, **overrides)
    tensors = open_tensors(model_dir)
    expected = param_names(config)
    names = match_names({name for name, _ in expected.values()}, tensors, config, model_dir)
    _check_tensors({names[name]: shape for name, shape in expected.values()}, tensors, model_dir)
    return config, {path: tensors[names[name]] for path, (name, _) in expected.items()}


def read_tensor(tensor: Any, index: tuple[slice, ...] | None = None) -> np.ndarray:
    """The values of a safetensors slice, whole or at `index`; only these bytes are read."""
    shape = tuple(tensor.get_shape())
    index = tuple(slice(None) for _ in shape) if index is None else index
    # Unlike numpy's, these slices do not clip at the end.
    return tensor[tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))]


def open_tensors(model_dir: pathlib.Path) -> dict[str, Any]:
    """Tensor name -> safetensors slice (`get_shape()`, `get_dtype()`, `[slices]`) over all files of a directory."""
    names_of_file = _files(model_dir)
    missing = sorted(name for name in names_of_file if not (model_dir / name).exists())
    if missing:
        raise ValueError(
            f"{model_dir}: missing shard file(s) {missing} of the {len(names_of_file)} that {INDEX_FILE} lists; "
            "copy or download them again"
        )
    tensors = {}
    for file_name, names in names_of_file.items():
        try:
            handle = safe_open(model_dir / file_name, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{model_dir / file_name}: not a complete safetensors file ({error}); copy or download it again"
            ) from error
        present = set(handle.keys())
        if names is not None and (absent := sorted(set(names) - present)):
            raise ValueError(f"{model_dir / file_name}: {INDEX_FILE} expects {_some(absent)} there, not found")
        tensors.update((name, handle.get_slice(name)) for name in present)
    return tensors


def match_names(
    expected: set[str], found: Mapping[str, Any], config: ModelConfig, model_dir: pathlib.Path
) -> dict[str, str]:
    """Expected HF tensor name -> name in the files, which may carry or lack a prefix.

    Raises:
      ValueError: with both lists, the expected names without a tensor and the tensors without a parameter.
    """
    prefix = next((p for p in _PREFIXES if p("model.embed_tokens.weight") in found), _PREFIXES[0])
    names = {name: prefix(name) for name in expected}
    missing = sorted(actual for actual in names.values() if actual not in found)
    unused = {name for name in found if not name.endswith(".rotary_emb.inv_freq")} - set(names.values())
    tied_head = prefix("lm_head.weight")
    if config.tie_embeddings and tied_head in unused:
        _check_tied(found[tied_head], found[names["model.embed_tokens.weight"]], model_dir)
        unused.remove(tied_head)
    if missing or unused:
        remedy = "expected the tensors of a dense decoder as config.json describes it"
        if missing == [tied_head]:
            remedy = "config.json says tie_word_embeddings: false; set it to true if this model shares its embedding"
        raise ValueError(
            f"{model_dir}: tensors and parameters do not match: missing from the files {_some(missing)}; "
            f"in the files without a parameter {_some(sorted(unused))}; {remedy}"
        )
    return names


def flatten(tree: Any) -> dict[str, Any]:
    """Parameter path, as `layers_0/attn/q/weight`, -> leaf."""
    return {path_str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object; errors name the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent}: got no {path.name}, expected a Hugging Face model directory") from error
    except ValueError as error:  # covers both bad JSON and bad UTF-8
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def _files(model_dir: pathlib.Path) -> dict[str, list[str] | None]:
    """File name -> tensor names that the index puts there (None without an index)."""
    if (model_dir / INDEX_FILE).exists():
        files: dict[str, list[str] | None] = {}
        for name, file_name in read_json(model_dir / INDEX_FILE)["weight_map"].items():
            files.setdefault(file_name, []).append(name)  # type: ignore[union-attr]
        return files
    if (model_dir / SINGLE_FILE).exists():
        return {SINGLE_FILE: None}
    other = sorted(p.name for p in model_dir.iterdir() if p.suffix in (".safetensors", ".bin", ".pth", ".pt", ".gguf"))
    raise ValueError(
        f"{model_dir}: got weights {other or 'none'}, expected {SINGLE_FILE} or {INDEX_FILE}; convert the model to "
        "safetensors (GGUF: python -m launch.convert hf-import)"
    )


def _check_tensors(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any], model_dir: pathlib.Path) -> None:
    """Refuses wrong shapes, all of them named, and number types that are not plain floats."""
    wrong = [
        f"{name}: got {got}, expected {shape}"
        for name, shape in shapes.items()
        if (got := tuple(tensors[name].get_shape())) != shape
    ]
    if wrong:
        raise ValueError(f"{model_dir}: tensor shapes differ from config.json: {_some(wrong)}; check config.json")
    types = {tensors[name].get_dtype() for name in shapes} - set(DTYPES)
    if types:
        raise ValueError(
            f"{model_dir}: got tensors of type {sorted(types)}, expected one of {sorted(DTYPES)}; "
            "quantised weights have to be converted first"
        )


def _check_tied(head: Any, embed: Any, model_dir: pathlib.Path, num_rows: int = 8192) -> None:
    """A tied model may carry its head a second time; a different one means that config.json is wrong."""
    blocks = [(slice(i, i + num_rows), slice(None)) for i in range(0, head.get_shape()[0], num_rows)]
    if head.get_shape() != embed.get_shape() or not all(
        np.array_equal(read_tensor(head, block), read_tensor(embed, block)) for block in blocks
    ):
        raise ValueError(
            f"{model_dir}: got an lm_head.weight that differs from the embedding, expected none or the same "
            "(tie_word_embeddings: true); set it to false in config.json to use both"
        )


def _read_array(tensor: Any, sharding: jax.sharding.Sharding, dtype: Any) -> jax.Array:
    """One parameter, read per device; replicas on one host share a read."""
    shape = tuple(tensor.get_shape())
    dtype = np.dtype(DTYPES[tensor.get_dtype()] if dtype is None else dtype)
    cache: dict[tuple, np.ndarray] = {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # None belongs to types that are no plain arrays
        key = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        if key not in cache:
            cache[key] = read_tensor(tensor, index).astype(dtype, copy=False)
        return cache[key]

    return jax.make_array_from_callback(shape, sharding, read)


def _some(items: Iterable[str], limit: int = 12) -> str:
    """The first items of a list that may be thousands long."""
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return f"[{', '.join(items[:limit])}]{more}"
