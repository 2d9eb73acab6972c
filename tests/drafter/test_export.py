import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.drafter.shapes import make
from tlt_jax.drafter import export
from tlt_jax.models.config import RopeScaling

D2T = np.array([0, 4, 7], np.int32)
# What the servers' classes declare: name -> shape, for D 32, F 48, 4 heads of 16, 2 kv heads, V 96.
LAYER = {
    "self_attn.q_proj.weight": (64, 32),
    "self_attn.k_proj.weight": (32, 32),
    "self_attn.v_proj.weight": (32, 32),
    "self_attn.o_proj.weight": (32, 64),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "post_attention_layernorm.weight": (32,),
}
BIASES = {"self_attn.q_proj.bias": (64,), "self_attn.k_proj.bias": (32,), "self_attn.v_proj.bias": (32,)}
EAGLE = {"fc.weight": (32, 64)} | {f"layers.0.{name}": shape for name, shape in (LAYER | BIASES).items()}
EAGLE3 = (
    {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (3, 32), "d2t": (3,), "t2d": (96,)}
    | {f"midlayer.{name}": shape for name, shape in LAYER.items()}
    | {f"midlayer.self_attn.{x}_proj.weight": (n, 64) for x, n in (("q", 64), ("k", 32), ("v", 32))}
    | {f"midlayer.{name}.weight": (32,) for name in ("input_layernorm", "hidden_norm")}
)


def shapes_in(path):
    with safe_open(path / "model.safetensors", framework="numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def save(tmp_path, form, server="sglang", d2t=None, **fields):
    config, draft_params, _ = make(form, draft_vocab_size=0 if d2t is None else len(d2t), **fields)
    out = tmp_path / f"{form}-{server}"
    export.save_drafter(out, config, draft_params, d2t, server=server)
    return config, draft_params, out, json.loads((out / "config.json").read_text())


def assert_equal_trees(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("server", export.SERVERS)
def test_eagle_layout_and_round_trip(server, tmp_path):
    """Names and shapes are those of the servers' classes; neither embedding nor head is in the file."""
    config, draft_params, out, fields = save(tmp_path, "eagle", server)
    bias = {"fc.bias": (32,)} if server == "sglang" else {}
    assert shapes_in(out) == EAGLE | bias
    if server == "sglang":
        assert fields["architectures"] == ["Qwen2ForCausalLMEagle"]
        assert not np.any(load_file(out / "model.safetensors")["fc.bias"])
    else:
        assert fields["architectures"] == ["EagleLlamaForCausalLM"]
        assert (fields["attention_bias"], fields["qkv_bias"]) == (False, True)
    assert (fields["num_hidden_layers"], fields["vocab_size"], fields["head_dim"]) == (1, 96, 16)
    got_config, got, d2t = export.load_drafter(out, config.target)
    assert got_config == config and d2t is None
    assert_equal_trees(got, draft_params)


def test_eagle3_layout_and_round_trip(tmp_path):
    """F3, F4: the map is in the file, as offsets, and comes back with the weights."""
    config, draft_params, out, fields = save(tmp_path, "eagle3", d2t=D2T)
    assert shapes_in(out) == EAGLE3
    tensors = load_file(out / "model.safetensors")
    assert tensors["d2t"].dtype == np.int64 and tensors["d2t"].tolist() == [0, 4, 7]
    assert np.flatnonzero(tensors["t2d"]).tolist() == [0, 5, 9]
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (fields["draft_vocab_size"], fields["vocab_size"], fields["tie_word_embeddings"]) == (3, 96, False)
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # by output
    assert fields["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]  # by input
    got_config, got, d2t = export.load_drafter(out, config.target)
    assert got_config == config and d2t.tolist() == [0, 4, 7]
    assert_equal_trees(got, draft_params)


def test_a_whole_vocabulary_has_the_identity_as_its_map(tmp_path):
    """F3."""
    config, _, out, _ = save(tmp_path, "eagle3")
    tensors = load_file(out / "model.safetensors")
    assert tensors["d2t"].shape == (96,) and not tensors["d2t"].any() and tensors["t2d"].all()
    assert export.load_drafter(out, config.target)[0] == config


def test_eagle_keeps_its_map_beside_the_weights(tmp_path):
    """F4."""
    config, _, out, _ = save(tmp_path, "eagle", d2t=D2T)
    assert "d2t" not in shapes_in(out)
    got_config, _, d2t = export.load_drafter(out, config.target)
    assert got_config == config and d2t.tolist() == [0, 4, 7]


def test_rewritten_for_the_other_server_the_weights_stay_to_the_bit(tmp_path):
    config, draft_params, _, _ = save(tmp_path, "eagle", "sglang")
    draft_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), draft_params)
    export.save_drafter(tmp_path / "bf16", config, draft_params, server="vllm")
    _, got, _ = export.load_drafter(tmp_path / "bf16", config.target, param_dtype=None)
    assert got["fc"]["weight"].dtype == jnp.bfloat16
    assert_equal_trees(got, draft_params)


def test_released_checkpoints_with_copies_of_the_target_and_a_bias(tmp_path):
    """As the EAGLE authors publish them: an embedding in the file, a bias on fc, a layer unlike the target's."""
    config, _, out, fields = save(tmp_path, "eagle")
    tensors = load_file(out / "model.safetensors")
    tensors = {f"model.{name}": x for name, x in tensors.items() if "self_attn" not in name or "bias" not in name}
    tensors["model.embed_tokens.weight"] = np.zeros((96, 32), np.float32)
    tensors["model.fc.bias"] = np.full(32, 0.5, np.float32)
    save_file(tensors, out / "model.safetensors")
    fields |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5}
    fields["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (out / "config.json").write_text(json.dumps(fields))
    got, params, _ = export.load_drafter(out, config.target)
    assert got.fc_bias and not got.layer.attention_bias
    assert (got.layer.rope_theta, got.layer.rope_scaling) == (5e5, RopeScaling(kind="linear", factor=2.0))
    assert params["fc"]["bias"].tolist() == [0.5] * 32 and "embed" not in params
    with pytest.raises(ValueError, match="vLLM's EAGLE class"):
        export.save_drafter(tmp_path / "x", got, params, server="vllm")
    export.save_drafter(tmp_path / "y", got, params)
    assert json.loads((tmp_path / "y" / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle"]


def test_what_cannot_be_exported_or_imported_is_named(tmp_path):
    config, draft_params, out, _ = save(tmp_path, "eagle")
    with pytest.raises(ValueError, match="existing path"):
        export.save_drafter(out, config, draft_params)
    with pytest.raises(ValueError, match="sglang, vllm"):
        export.save_drafter(tmp_path / "x", config, draft_params, server="trt")
    reduced = dataclasses.replace(config, draft_vocab_size=3)
    with pytest.raises(ValueError, match="load the map"):
        export.save_drafter(tmp_path / "x", reduced, draft_params)
    with pytest.raises(ValueError, match=r"down_proj.weight: got \(32, 48\), expected \(32, 40\)"):
        fields = json.loads((out / "config.json").read_text()) | {"intermediate_size": 40}
        (out / "config.json").write_text(json.dumps(fields))
        export.load_drafter(out, config.target)
    assert not (tmp_path / "x").exists()
