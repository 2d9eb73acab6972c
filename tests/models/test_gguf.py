"""GGUF files in: the same model comes out, whatever the file does to its rows, its head and its tokenizer."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks import parity_models as tiny
from tests.models.tiny_gguf import TOKENS, write_gguf
from tlt_jax.models import gguf as gguf_in, hf
from tlt_jax.models.config import RopeScaling, rope_frequencies


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_the_model_comes_back_to_the_bit(name, tmp_path):
    """D7: query and key rows of llama files are put back in HF's order, Qwen's are left; biases, norms, heads too.

    Rope scaling comes back from its metadata, Llama 3's from the tensor of frequency factors.
    """
    config = tiny.FAMILIES[name]
    if config.rope_scaling and config.rope_scaling.kind == "llama3":
        scaling = dataclasses.replace(config.rope_scaling, original_max_position_embeddings=8192)
        config = dataclasses.replace(config, rope_scaling=scaling)
    params = tiny.random_params(config)
    extra = {}
    if config.rope_scaling and config.rope_scaling.kind == "llama3":
        plain, _ = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
        extra["rope_freqs.weight"] = plain / rope_frequencies(config)[0]
    write_gguf(tmp_path / "m.gguf", config, params, extra=extra)
    returned = gguf_in.import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    loaded, weights = hf.load_hf(tmp_path / "out")
    assert returned == loaded == dataclasses.replace(config, num_valid_tokens=90)
    expected, got = hf.flatten(params), hf.flatten(weights)
    assert expected.keys() == got.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)


def test_unpermuting_by_hand():
    """D7: one head of four rows: 0 1 2 3 were 0 2 1 3 in HF's order."""
    rows = np.arange(8.0).reshape(8, 1)
    assert gguf_in.interleaved_to_half_split(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def quantised(array, kind):
    return gguf.dequantize(gguf.quantize(array, kind), kind)


@pytest.mark.parametrize("finer", ["embedding", "head"])
def test_one_tied_matrix_quantised_twice_keeps_the_finer(finer, tmp_path):
    """D1: a tied model whose file has an output.weight too stays tied, and uses the less coarse of the two."""
    config, Kind = tiny.FAMILIES["qwen2"], gguf.GGMLQuantizationType
    params = tiny.random_params(config)
    embed = params["embed"]["weight"]
    kinds = {"token_embd.weight": Kind.Q8_0, "output.weight": Kind.Q4_0}
    if finer == "head":
        kinds = {"token_embd.weight": Kind.Q4_0, "output.weight": Kind.Q8_0}
    write_gguf(tmp_path / "m.gguf", config, params, extra={"output.weight": embed}, quantise=kinds)
    assert gguf_in.import_gguf(tmp_path / "m.gguf", tmp_path / "out").tie_embeddings
    _, weights = hf.load_hf(tmp_path / "out")
    assert "head" not in weights
    np.testing.assert_array_equal(weights["embed"]["weight"], quantised(embed, Kind.Q8_0))
    assert np.abs(quantised(embed, Kind.Q4_0) - quantised(embed, Kind.Q8_0)).max() > 0.01


def test_an_untied_head_stays_apart(tmp_path):
    """D2: another matrix is a head of its own, and a file in bf16 rounds each value once."""
    config = tiny.FAMILIES["qwen2_untied"]
    params = tiny.random_params(config)
    write_gguf(tmp_path / "m.gguf", config, params)
    assert not gguf_in.import_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype="bfloat16").tie_embeddings
    _, weights = hf.load_hf(tmp_path / "out", param_dtype=None)
    head = params["head"]["weight"]
    np.testing.assert_array_equal(np.asarray(weights["head"]["weight"]), head.astype(weights["head"]["weight"].dtype))


def test_tokenizer_is_rebuilt(tmp_path):
    """D9: merges, special tokens and chat template come back; padding rows of the embedding are no tokens."""
    config = tiny.FAMILIES["qwen2"]
    write_gguf(tmp_path / "m.gguf", config, tiny.random_params(config))
    gguf_in.import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("hello <s3>hell").tokens == ["hello", "Ġ", "<s3>", "hell"]
    assert tokenizer.encode("<s0>").ids == [len(TOKENS)]
    assert tokenizer.get_vocab_size() == 90 == hf.tokenizer_len(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("a 12, hello!").ids) == "a 12, hello!"
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["chat_template"] == "{{ messages[0]['content'] }}"
    assert (written["eos_token"], written["bos_token"], written["pad_token"]) == ("c", "b", "a")


def test_special_tokens_before_the_others_keep_their_ids(tmp_path, monkeypatch):
    """Ids of added tokens inside the vocabulary must not be numbered anew."""
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", _first_two_special(gguf.GGUFWriter.add_token_types))
    config = tiny.FAMILIES["qwen2"]
    write_gguf(tmp_path / "m.gguf", config, tiny.random_params(config))
    gguf_in.import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("cab").ids == [2, 0, 1]


def _first_two_special(add_token_types):
    return lambda writer, types: add_token_types(writer, [3, 3, *types[2:]])


def test_what_is_not_supported_is_refused(tmp_path):
    """D5, D11: another file, architecture, tensor, scaling or tokenizer, each with what was found."""
    config = tiny.FAMILIES["qwen2"]
    params = tiny.random_params(config)
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    path.write_bytes(b"PK\x03\x04 no model")
    with pytest.raises(ValueError, match=r"starts with b'PK\\x03\\x04', expected a GGUF file"):
        gguf_in.import_gguf(path, out)
    write_gguf(path, dataclasses.replace(config, model_type="phi3"), params)
    with pytest.raises(ValueError, match=r"general.architecture: got 'phi3', expected one of llama, qwen2, qwen3"):
        gguf_in.import_gguf(path, out)
    write_gguf(path, config, params, extra={"blk.0.ffn_gate_exps.weight": np.ones((2, 32), np.float32)})
    with pytest.raises(ValueError, match=r"in the file without a parameter \['blk.0.ffn_gate_exps.weight'\]"):
        gguf_in.import_gguf(path, out)
    write_gguf(path, config, params, extra={"blk.1.attn_v.weight": np.ones((8, 32), np.float32)})
    with pytest.raises(ValueError, match=r"blk.1.attn_v.weight: got \(8, 32\), expected \(16, 32\)"):
        gguf_in.import_gguf(path, out)
    write_gguf(path, config, params, extra={"rope_freqs.weight": np.asarray([1, 1, 3, 9], np.float32)})
    with pytest.raises(ValueError, match=r"rope_freqs.weight: got factors 1 to 9 that are not those of Llama"):
        gguf_in.import_gguf(path, out)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"m.gguf: not a complete GGUF file"):
        gguf_in.import_gguf(path, out)
    assert not out.exists()


def test_an_unknown_splitter_is_refused(tmp_path, monkeypatch):
    """A tokenizer that splits text in an unknown way would give other ids without a word."""
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda w, _: w.add_string("tokenizer.ggml.pre", "odd"))
    config = tiny.FAMILIES["qwen2"]
    write_gguf(tmp_path / "m.gguf", config, tiny.random_params(config))
    with pytest.raises(ValueError, match=r"got model 'gpt2' with splitter 'odd', expected .* smollm, qwen2, llama-bpe"):
        gguf_in.import_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_an_unknown_scaling_is_refused(tmp_path):
    """D5: never read and left unused."""
    config = tiny.FAMILIES["qwen2"]
    longrope = dataclasses.replace(config, rope_scaling=RopeScaling(kind="longrope", factor=4.0))
    write_gguf(tmp_path / "m.gguf", longrope, tiny.random_params(config))
    with pytest.raises(ValueError, match=r"rope.scaling: got type 'longrope', factor 4.0; expected linear or yarn"):
        gguf_in.import_gguf(tmp_path / "m.gguf", tmp_path / "out")
