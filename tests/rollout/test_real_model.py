"""SmolLM2-135M-Instruct: the same tokens whatever the batch, on real weights.

It is fetched, or read from the directory in TLT_MODEL_DIR_SMOLLM2.
"""

import os

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from launch.fetch import resolve_model
from tests.rollout.tiny import tokens_of
from tlt_jax.models import hf
from tlt_jax.models.transformer import compute_logits, forward
from tlt_jax.rollout.config import RolloutConfig
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.sharding import param_shardings, publish
from tlt_jax.types import Request, SamplingParams

QUESTIONS = [
    "What is 12 + 30?",
    "Name three colours.",
    "Who wrote Hamlet?",
    "Tom has 3 apples and buys 5 more. He eats 2. How many apples does Tom have now? Explain step by step.",
    "Translate 'good morning' into French.",
    "Write one sentence about the sea.",
    "List the first five prime numbers, with commas between them, and say which one of them is even.",
    "Hi!",
]


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_batch_on_real_weights():
    """8 prompts x (1 sample at temperature 1, 1 greedy), 32 tokens, at most 1, 4 and 16 live; f32, token for token.

    Where a neighbour differs it must be a near-tie: none is expected.
    """
    model_dir = resolve_model(os.environ.get("TLT_MODEL_DIR_SMOLLM2", "smollm2-135m"))
    config, params = hf.load_hf(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    requests = []
    for i, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for sample, temperature in enumerate((1.0, 0.0)):
            sampling = SamplingParams(temperature=temperature, max_tokens=32)
            requests.append(
                Request(request_id=2 * i + sample, prompt_id=i, prompt_ids=tuple(ids), sample=sample, sampling=sampling)
            )
    weights, outputs = None, {}
    for max_live in (1, 4, 16):
        engine = RolloutEngine(config, RolloutConfig(max_live=max_live, max_len=160), seed=1)
        weights = weights or publish(params, param_shardings(params, engine.mesh), 0)
        engine.load(weights)
        outputs[max_live] = engine.generate(requests)
    assert tokens_of(outputs[1]) == tokens_of(outputs[4]) == tokens_of(outputs[16])
    assert any(len(c.token_ids) < 32 for c in outputs[1]) and any(len(c.token_ids) == 32 for c in outputs[1])
    for a, b in zip(outputs[1], outputs[16], strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)

    c = outputs[16][0]  # A5 on real weights: log-probs of a teacher-forced forward
    row = np.asarray([[*c.prompt_ids, *c.token_ids]], np.int32)
    hidden = jax.jit(lambda p, x: forward(p, config, x, np.arange(x.shape[1])[None]).hidden)(params, row)
    first = len(c.prompt_ids) - 1
    logprobs = jax.nn.log_softmax(compute_logits(params, config, hidden[0, first:-1]))
    np.testing.assert_allclose(logprobs[np.arange(len(c.token_ids)), c.token_ids], c.logprobs, atol=1e-3)
