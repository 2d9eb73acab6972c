"""The tokenizer of a GGUF file, rebuilt as `tokenizer.json` and `tokenizer_config.json`.

GGUF keeps the vocabulary, the merges, the type of each token, the chat template, and the name of the text splitter that
goes before the merges; the splitters themselves are listed here. Byte-level BPE only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tlt_jax.models.config import ModelConfig

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types; 5 marks a padding row of the embedding

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_LLAMA3_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _split_by(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


# tokenizer.ggml.pre -> (normalizer, pre-tokenizers, whether whole words of the vocabulary skip the merges)
_SPLITTERS: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]], bool]] = {
    "smollm": (None, [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)], False),
    "qwen2": ({"type": "NFC"}, _split_by(_QWEN_PATTERN), False),
    "llama-bpe": (None, _split_by(_LLAMA3_PATTERN), True),
}


def num_tokens(get: Callable[..., Any]) -> int:
    """Number of ids that are tokens: rows above the last real one only pad the embedding."""
    types = get("tokenizer.ggml.token_type")
    return 1 + max(i for i, kind in enumerate(types) if kind in (_NORMAL, _CONTROL, _USER_DEFINED))


def rebuild(get: Callable[..., Any], config: ModelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of `tokenizer.json` and of `tokenizer_config.json`.

    Args:
      get: metadata by key.
      config: for the context length.

    Raises:
      ValueError: not a byte-level BPE tokenizer, or one with an unknown splitter.
    """
    model, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _SPLITTERS:
        raise ValueError(
            f"GGUF tokenizer: got model {model!r} with splitter {pre!r}, expected model 'gpt2' (byte-level BPE) with "
            f"one of {', '.join(_SPLITTERS)}; use the model's Hugging Face directory"
        )
    tokens = get("tokenizer.ggml.tokens")
    adds_bos = bool(get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"))

    def token(role: str) -> str | None:
        index = get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index]

    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos,
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "chat_template": get("tokenizer.chat_template"),
    }
    bos_id = get("tokenizer.ggml.bos_token_id") if adds_bos else None
    return _tokenizer(get, pre, bos_id), {k: v for k, v in tokenizer_config.items() if v is not None}


def _tokenizer(get: Callable[..., Any], pre: str, bos_id: int | None) -> dict[str, Any]:
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    normalizer, splitters, ignore_merges = _SPLITTERS[pre]
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for i, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {tokens[i]: i for i in range(_vocab_len(types))},
        "merges": [merge.split(" ") for merge in get("tokenizer.ggml.merges")],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters},
        "post_processor": None if bos_id is None else _bos_processor(tokens[bos_id], bos_id),
        "decoder": _byte_level(use_regex=True),
        "model": model,
    }


def _vocab_len(types: list[int]) -> int:
    """Ids that go into the vocabulary itself.

    Added tokens after it are numbered on from its end, whatever their `id` says; so those between other tokens have to
    be in it, and all of them where the numbering has gaps.
    """
    real = [i for i, kind in enumerate(types) if kind in (_NORMAL, _CONTROL, _USER_DEFINED)]
    end = 1 + max(i for i, kind in enumerate(types) if kind == _NORMAL)
    return end if real[-1] + 1 - end == sum(i >= end for i in real) else real[-1] + 1


def _bos_processor(bos: str, bos_id: int) -> dict[str, Any]:
    """Puts the begin-of-text token before a text that is encoded with special tokens."""
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, special, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
