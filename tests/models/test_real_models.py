"""The real models give the numbers that transformers gives in f32.

SmolLM2-135M-Instruct is fetched (or read from the directory in TLT_MODEL_DIR_SMOLLM2). Qwen2.5-Coder-0.5B-Instruct,
from a Q4_K_M quantisation dequantised to f32, is checked too where TLT_MODEL_DIR_QWEN names its directory.
"""

import json
import os
import pathlib

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks import parity_models as tiny
from launch.fetch import resolve_model
from tlt_jax.models import hf

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
MODELS = {"smollm2_135m_instruct": os.environ.get("TLT_MODEL_DIR_SMOLLM2", "smollm2-135m")}
if "TLT_MODEL_DIR_QWEN" in os.environ:
    MODELS["qwen2_5_coder_0_5b_instruct"] = os.environ["TLT_MODEL_DIR_QWEN"]
NEAR_TIE = 2e-3  # nats: closer candidates may change places with the order of a sum


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """(directory, records, log-probs f32[B,T,V] of prompt and recorded answer, padded to one length)."""
    model_dir = resolve_model(MODELS[request.param])
    records = json.loads((GOLDEN / f"{request.param}.json").read_text())
    config, params = hf.load_hf(model_dir)
    rows = [r["input_ids"] + r["greedy_ids"] for r in records]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    return model_dir, records, np.asarray(jax.nn.log_softmax(tiny.logits_uncached(params, config, tokens)))


@pytest.mark.slow
def test_chat_template_and_tokenizer_give_the_recorded_ids(model):
    """B20: the rebuilt tokenizer turns the message into the very ids, and the answer's ids into its text."""
    model_dir, records, _ = model
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for record in records:
        messages = [{"role": "user", "content": record["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == record["input_ids"]
        assert tokenizer.decode(record["greedy_ids"]) == record["greedy_text"]


@pytest.mark.slow
def test_log_probs_equal_the_recorded_ones(model):
    """D1, D5, D7, D13 on real weights: every prompt token, and the ten likeliest after it, within 2e-3."""
    _, records, logprobs = model
    for record, logprobs_TV in zip(records, logprobs, strict=True):
        ids = record["input_ids"]
        got = logprobs_TV[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(got, record["prompt_token_logprobs"], rtol=0, atol=2e-3)
        top = logprobs_TV[len(ids) - 1, record["last_top_ids"]]
        np.testing.assert_allclose(top, record["last_top_logprobs"], rtol=0, atol=2e-3)


@pytest.mark.slow
def test_greedy_tokens_equal_the_recorded_ones(model):
    """After each prefix of the recorded answer its next token is the likeliest, or in a near-tie with it."""
    _, records, logprobs = model
    for record, logprobs_TV in zip(records, logprobs, strict=True):
        answer, start = record["greedy_ids"], len(record["input_ids"]) - 1
        logprobs_TV = logprobs_TV[start : start + len(answer)]
        lead = logprobs_TV.max(-1) - logprobs_TV[np.arange(len(answer)), answer]
        other = {t: (int(logprobs_TV[t].argmax()), answer[t], float(lead[t])) for t in np.flatnonzero(lead)}
        assert all(gap < NEAR_TIE for _, _, gap in other.values()), f"(ours, recorded, nats) by position: {other}"
        assert len(other) <= 1, f"near-ties (ours, recorded, nats) by position: {other}"
