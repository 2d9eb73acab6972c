"""Model directories in and out: tied and untied heads, shards, names, shapes, padded vocabularies, shardings."""

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from benchmarks import parity_models as tiny
from tlt_jax.models import hf, hf_export, transformer
from tlt_jax.models.config import ModelConfig
from tlt_jax.sharding import MeshConfig, make_mesh, param_shardings

QWEN = tiny.FAMILIES["qwen2_untied"]
TIED = tiny.FAMILIES["qwen2"]


def edit_tensors(model_dir, change):
    """Rewrites model.safetensors by `change(dict)`."""
    tensors = load_file(model_dir / hf.SINGLE_FILE)
    save_file(change(tensors) or tensors, model_dir / hf.SINGLE_FILE)


def assert_same(params, other):
    assert jax.tree.structure(params) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def logits_of_hidden(config, params):
    """Logits [D,V] of the D unit hidden states: the head's transpose."""
    return np.asarray(transformer.compute_logits(params, config, jnp.eye(config.hidden_size)))


def test_tied_head_is_the_embedding(tmp_path):
    """D1: a tied file has no lm_head; logits are h @ E^T."""
    written = tiny.write_model(tmp_path / "m", TIED)
    assert "lm_head.weight" not in load_file(tmp_path / "m" / hf.SINGLE_FILE)
    config, params = hf.load_hf(tmp_path / "m")
    assert config.tie_embeddings and "head" not in params
    np.testing.assert_allclose(logits_of_hidden(config, params), written["embed"]["weight"].T, rtol=1e-6)


def test_a_repeated_tied_head_is_ignored_and_a_different_one_refused(tmp_path):
    """D1: some files store the tied head again."""
    tiny.write_model(tmp_path / "m", TIED)
    edit_tensors(tmp_path / "m", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert "head" not in hf.load_hf(tmp_path / "m")[1]
    edit_tensors(tmp_path / "m", lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=r"lm_head.weight that differs.*set it to false"):
        hf.load_hf(tmp_path / "m")


def test_untied_head_is_loaded_and_needed(tmp_path):
    """D2: an untied model uses its own head; without it, an error that names it."""
    written = tiny.write_model(tmp_path / "m", QWEN)
    logits = logits_of_hidden(*hf.load_hf(tmp_path / "m"))
    np.testing.assert_allclose(logits, written["head"]["weight"].T, rtol=1e-6)
    assert np.abs(logits - written["embed"]["weight"].T).max() > 0.5
    edit_tensors(tmp_path / "m", lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"missing from the files \[lm_head.weight\].*tie_word_embeddings: false"):
        hf.load_hf(tmp_path / "m")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_load_export_load_is_equal_to_the_bit(tmp_path, dtype):
    """D7: no permutation on either way; every number type survives, and so does the configuration."""
    hf_export.save_hf(tmp_path / "a", QWEN, tiny.random_params(QWEN), dtype=dtype)
    config, params = hf.load_hf(tmp_path / "a", param_dtype=None)
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {dtype}
    hf_export.save_hf(tmp_path / "b", config, params, tmp_path / "a")
    again, params_again = hf.load_hf(tmp_path / "b", param_dtype=None)
    assert again == config == QWEN
    assert_same(params, params_again)
    assert (tmp_path / "a" / hf.SINGLE_FILE).read_bytes() == (tmp_path / "b" / hf.SINGLE_FILE).read_bytes()


def test_casts_to_the_dtype_asked_for(tmp_path):
    written = tiny.write_model(tmp_path / "m", TIED)
    config, params = hf.load_hf(tmp_path / "m", param_dtype=jnp.bfloat16, dtype="bfloat16")
    assert config.dtype == "bfloat16"
    assert_same(params, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), written))


def test_head_width_of_its_own(tmp_path):
    """D8: hidden 64, 4 heads of 32: q is [128,64] and o is [64,128]; another head_dim is refused with both shapes."""
    config = dataclasses.replace(tiny.FAMILIES["qwen3"], hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32)
    tiny.write_model(tmp_path / "m", config)
    with safe_open(tmp_path / "m" / hf.SINGLE_FILE, framework="numpy") as file:
        shapes = [file.get_slice(f"model.layers.0.self_attn.{k}_proj.weight").get_shape() for k in "qo"]
        assert shapes == [[128, 64], [64, 128]]
        assert file.get_slice("model.layers.0.self_attn.q_norm.weight").get_shape() == [32]  # D6: per head
    assert hf.load_hf(tmp_path / "m")[1]["layers_1"]["attn"]["o"]["weight"].shape == (64, 128)
    fields = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(fields | {"head_dim": 16}))
    with pytest.raises(ValueError, match=r"q_proj.weight: got \(128, 64\), expected \(64, 64\)"):
        hf.load_hf(tmp_path / "m")


def write_tokenizer(model_dir, num_ids):
    vocab = {f"t{i}": i for i in range(num_ids - 1)}
    added = [{"id": num_ids - 1, "content": "<end>", "special": True}]
    (model_dir / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added})
    )


def test_padded_vocabulary_rows_have_no_probability_and_stay_in_the_export(tmp_path):
    """D9: 152 rows, 150 tokens, rows 150 and 151 at logit +10: never likely, and still 152 rows after an export."""
    config = dataclasses.replace(TIED, vocab_size=152)
    params = tiny.random_params(config)
    params["embed"]["weight"][150:] = 10.0
    hf_export.save_hf(tmp_path / "m", config, params)
    write_tokenizer(tmp_path / "m", 150)
    config, loaded = hf.load_hf(tmp_path / "m")
    assert (config.vocab_size, config.num_valid_tokens) == (152, 150)
    hidden = jnp.zeros((1, config.hidden_size)).at[0, 0].set(1.0)
    logits = transformer.compute_logits(loaded, config, hidden)[0]
    assert jax.nn.softmax(logits)[150:].tolist() == [0.0, 0.0]
    expected = jax.nn.log_softmax(jnp.asarray(params["embed"]["weight"][:150, 0]))
    np.testing.assert_allclose(jax.nn.log_softmax(logits)[:150], expected, rtol=1e-5)
    hf_export.save_hf(tmp_path / "out", config, loaded, tmp_path / "m")
    assert load_file(tmp_path / "out" / hf.SINGLE_FILE)["model.embed_tokens.weight"].shape == (152, config.hidden_size)
    assert hf.load_config(tmp_path / "out") == config


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    """D9: ids without a row."""
    tiny.write_model(tmp_path / "m", TIED)
    write_tokenizer(tmp_path / "m", 97)
    with pytest.raises(ValueError, match=r"got a tokenizer of 97 ids for 96 embedding rows"):
        hf.load_config(tmp_path / "m")


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_other_prefixes_of_the_same_decoder(tmp_path, prefix):
    """D11: a decoder without `model.`, or inside a multi-modal model, is found."""
    written = tiny.write_model(tmp_path / "m", TIED)
    edit_tensors(tmp_path / "m", lambda t: {prefix + k.removeprefix("model."): v for k, v in t.items()})
    assert_same(hf.load_hf(tmp_path / "m")[1], written)


def test_unmatched_names_are_listed_on_both_sides(tmp_path):
    """D11: extra and missing keys, both lists in one message."""
    tiny.write_model(tmp_path / "m", TIED)
    edit_tensors(tmp_path / "m", lambda t: t.update({"visual.proj": t.pop("model.norm.weight")}))
    with pytest.raises(ValueError, match=r"missing from the files \[model.norm.weight\].*parameter \[visual.proj\]"):
        hf.load_hf(tmp_path / "m")


def test_biases_count(tmp_path):
    """D13: biases are read: zeroing those of q, k and v changes the logits; there is none on o."""
    tiny.write_model(tmp_path / "m", TIED)
    names = set(load_file(tmp_path / "m" / hf.SINGLE_FILE))
    assert {n.split(".")[-2] for n in names if n.endswith("bias")} == {"q_proj", "k_proj", "v_proj"}
    tokens = tiny.ragged_batch(TIED)
    config, params = hf.load_hf(tmp_path / "m")
    biased = tiny.logits_uncached(params, config, tokens)
    edit_tensors(tmp_path / "m", lambda t: {k: v * (0 if k.endswith("bias") else 1) for k, v in t.items()})
    unbiased = tiny.logits_uncached(hf.load_hf(tmp_path / "m")[1], config, tokens)
    assert np.abs(np.asarray(biased - unbiased)).max() > 0.1


def write_sharded(model_dir):
    """A model in five files with an index."""
    params = tiny.random_params(QWEN)
    hf_export.save_hf(model_dir, QWEN, params, max_shard_bytes=20_000)
    return params


def test_sharded_files_with_an_index(tmp_path):
    params = write_sharded(tmp_path / "m")
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) == 5 and files[0] == "model-00001-of-00005.safetensors"
    assert all((tmp_path / "m" / name).stat().st_size < 24_000 for name in files)
    assert_same(hf.load_hf(tmp_path / "m")[1], params)


def test_a_missing_or_damaged_shard_is_named(tmp_path):
    """Before any weight is read; a file cut short counts as damaged."""
    write_sharded(tmp_path / "m")
    shard = tmp_path / "m" / "model-00002-of-00005.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"model-00002-of-00005.safetensors: not a complete safetensors file"):
        hf.load_hf(tmp_path / "m")
    shard.unlink()
    with pytest.raises(ValueError, match=r"missing shard file\(s\) \['model-00002-of-00005.safetensors'\]"):
        hf.load_hf(tmp_path / "m")


def test_directories_that_are_no_models(tmp_path):
    with pytest.raises(ValueError, match=r"got .*nowhere, which does not exist"):
        hf.load_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"got no config.json, expected a Hugging Face model directory"):
        hf.load_config(tmp_path)
    tiny.write_model(tmp_path / "m", TIED)
    (tmp_path / "m" / hf.SINGLE_FILE).rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"got weights \['pytorch_model.bin'\], expected model.safetensors"):
        hf.load_hf(tmp_path / "m")
    fields = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(fields | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ValueError, match=r"got quantization_config .'bits': 4., expected plain"):
        hf.load_config(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        hf.load_config(tmp_path / "m")


def test_integer_weights_are_refused(tmp_path):
    tiny.write_model(tmp_path / "m", TIED)
    edit_tensors(tmp_path / "m", lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))
    with pytest.raises(ValueError, match=r"got tensors of type \['I8'\], expected one of"):
        hf.load_hf(tmp_path / "m")


def test_loads_into_shardings_and_exports_from_them(tmp_path):
    """D7, E4: sharded over 8 devices in and out, the bytes of the file stay the same."""
    written = tiny.write_model(tmp_path / "a", QWEN)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    shardings = param_shardings(transformer.param_shapes(QWEN), mesh, heads=QWEN.num_kv_heads)
    config, params = hf.load_hf(tmp_path / "a", shardings=shardings)
    assert params["layers_0"]["mlp"]["up"]["weight"].sharding.shard_shape((48, 32)) == (24, 16)
    assert_same(params, written)
    hf_export.save_hf(tmp_path / "b", config, params)
    assert (tmp_path / "a" / hf.SINGLE_FILE).read_bytes() == (tmp_path / "b" / hf.SINGLE_FILE).read_bytes()


class RecordingSlice:
    """A tensor of zeros that remembers what was read of it."""

    def __init__(self, shape):
        self.shape, self.read = shape, []

    def get_dtype(self):
        return "F32"

    def get_shape(self):
        return list(self.shape)

    def __getitem__(self, slices):
        self.read.append(tuple((s.start, s.stop) for s in slices))
        return np.zeros(self.shape, np.float32)[slices]


def test_only_the_slices_of_a_hosts_devices_are_read():
    """Rows over two of the eight devices: two halves are read, replicas share them, and never the whole tensor."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])
    tensor = RecordingSlice((8, 4))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tensor", None))
    array = hf._read_array(tensor, sharding, "float32")
    assert array.sharding == sharding
    assert sorted(tensor.read) == [((0, 4), (0, 4)), ((4, 8), (0, 4))]


def test_peak_host_memory_is_the_model_and_one_tensor(tmp_path):
    """Loading with a cast, and exporting from several devices: never a second copy of the model on the host."""
    config = dataclasses.replace(TIED, num_layers=4, hidden_size=256, intermediate_size=1024, head_dim=64)
    tiny.write_model(tmp_path / "m", config)
    sizes = [int(np.prod(shape)) for _, shape in hf.param_names(config).values()]
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    shardings = param_shardings(transformer.param_shapes(config), mesh)
    tracemalloc.start()
    config, params = hf.load_hf(tmp_path / "m", param_dtype=jnp.bfloat16, shardings=shardings)
    jax.block_until_ready(params)
    load_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    hf_export.save_hf(tmp_path / "out", config, params)
    export_peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    model, largest, slack = 2 * sum(sizes), max(sizes), 2_000_000  # slack: headers, names, abstract evaluation
    assert model > 7_000_000
    assert load_peak < model + largest * (4 + 2) + slack
    assert export_peak < largest * 4 + slack


def test_export_copies_the_tokenizer_and_writes_what_generation_needs(tmp_path):
    """B12: several EOS ids reach generation_config.json, where no source brings one."""
    config = dataclasses.replace(TIED, eos_token_ids=(2, 3))
    hf_export.save_hf(tmp_path / "a", config, tiny.random_params(config))
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text())["eos_token_id"] == [2, 3]
    write_tokenizer(tmp_path / "a", 96)
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": 2, "top_p": 0.8}')
    hf_export.save_hf(tmp_path / "b", *hf.load_hf(tmp_path / "a"), tmp_path / "a")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "float32"


def test_export_is_whole_or_absent(tmp_path, monkeypatch):
    """A failing disk leaves no directory, an existing one is never touched, wrong parameters are named."""
    params = tiny.random_params(TIED)
    with pytest.raises(ValueError, match=r"got an existing path, expected a new one"):
        hf_export.save_hf(tmp_path, TIED, params)
    del params["layers_1"]["attn"]["q"]["bias"]
    with pytest.raises(ValueError, match=r"at 1 paths: layers_1/attn/q/bias: got None, expected \(32,\)"):
        hf_export.save_hf(tmp_path / "m", TIED, params)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_export.os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"No space left"):
        hf_export.save_hf(tmp_path / "m", TIED, tiny.random_params(TIED))
    assert list(tmp_path.iterdir()) == []


def test_the_index_and_headers_follow_the_format(tmp_path):
    """What another reader relies on: sorted offsets from 0, data at a multiple of 8, total size in the index."""
    write_sharded(tmp_path / "m")
    index = json.loads((tmp_path / "m" / hf.INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 4 * hf.num_params(QWEN)
    for name in set(index["weight_map"].values()):
        raw = (tmp_path / "m" / name).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"} and length % 8 == 0
        ends = [0, *(entry["data_offsets"][1] for entry in header.values())]
        assert [entry["data_offsets"][0] for entry in header.values()] == ends[:-1]
        assert ends[-1] == len(raw) - 8 - length
    assert ModelConfig.from_hf(json.loads((tmp_path / "m" / "config.json").read_text())) == QWEN
