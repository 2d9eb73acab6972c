"""Speculative rounds commit what plain decoding draws, whatever the drafter proposes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout import tiny
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.decode import make_draft_model, prepare
from tlt_jax.drafter.model import draft_forward_cached, init_draft_params
from tlt_jax.models.cache import LayerCache, init_cache
from tlt_jax.models.transformer import forward, forward_cached
from tlt_jax.rollout import speculate as spec
from tlt_jax.rollout.memory import Memory
from tlt_jax.rollout.noise import request_key
from tlt_jax.rollout.sampling import SamplingArrays
from tlt_jax.rollout.steps import MAX_STOP_IDS, Rows
from tlt_jax.types import DraftModel

S = 96
SHAPES = [spec.Shape(3, 1, 4), spec.Shape(3, 3, 8)]
SAMPLING = [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}]


def requests():
    lengths = (1, 7, 12)
    return [
        tiny.request(i, tiny.prompt(i, n), prompt_id=i, max_tokens=20 - 3 * i, **SAMPLING[i])
        for i, n in enumerate(lengths)
    ]


@functools.cache
def plain():
    return tiny.make_engine().generate(requests())


def table_drafter(answers_BS: np.ndarray, strength: float) -> DraftModel:
    """Knows the token at every position of every row; `strength` nats of it over noise of its own.

    Its output carries the position that its logits are of, so it needs no weights and no features.
    """
    table = jnp.asarray(np.pad(answers_BS, ((0, 0), (0, 40))))

    def apply(weights, params, features, tokens, start, cache, positions, block_mask):
        if positions is None:
            positions = start[:, None] + jnp.arange(tokens.shape[1])
        del weights, params, features, block_mask
        return jnp.repeat(positions[..., None].astype(jnp.float32), tiny.MODEL.hidden_size, axis=-1), cache

    def logits(weights, params, h):
        del weights, params
        position = h[..., 0].astype(jnp.int32) + 2
        right = jnp.take_along_axis(table, position, axis=1)
        own = jax.random.gumbel(jax.random.key(3), (256, tiny.VOCAB))[position]
        return own + strength * jax.nn.one_hot(right, tiny.VOCAB)

    return DraftModel(
        apply,
        logits,
        lambda ids: ids,
        tiny.VOCAB,
        lambda rows, slots, dtype: init_cache(tiny.MODEL, rows, slots, dtype)[0],
    )


def answers() -> np.ndarray:
    rows = np.zeros((3, S), np.int32)
    for i, c in enumerate(plain()):
        full = [*c.prompt_ids, *c.token_ids]
        rows[i, : len(full)] = full
    return rows


def start_state(shape: spec.Shape):
    """Rows, memory and pending tokens right after prefill, features of all prompt positions but the last."""
    rs, model, params = requests(), tiny.MODEL, tiny.tiny_params()
    lengths = np.asarray([len(r.prompt_ids) - 1 for r in rs], np.int32)
    tokens = np.zeros((3, S), np.int32)
    for i, r in enumerate(rs):
        tokens[i, : len(r.prompt_ids)] = r.prompt_ids
    out, cache = forward_cached(
        params, model, tokens[:, :16], jnp.zeros(3, jnp.int32), init_cache(model, 3, S, "float32")
    )
    features = jnp.zeros((3, S, model.hidden_size)).at[:, :16].set(out.hidden)
    draft_cache = init_cache(DraftConfig(target=model).layer, 3, S, "float32")[0]
    num = np.minimum(lengths, shape.depth + 1)
    pending = np.zeros((3, shape.width), np.int32)
    for i, (length, n) in enumerate(zip(lengths, num, strict=True)):
        pending[i, :n] = tokens[i, length - n + 1 : length + 1]
    sampling = SamplingArrays(
        key=np.stack([request_key(tiny.SEED, r.request_id) for r in rs]),
        temperature=np.asarray([r.sampling.temperature for r in rs], np.float32),
        top_k=np.zeros(3, np.int32),
        top_p=np.asarray([r.sampling.top_p for r in rs], np.float32),
        min_p=np.zeros(3, np.float32),
    )
    stop_ids = np.full((3, MAX_STOP_IDS), -1, np.int32)
    stop_ids[:, :2] = model.eos_token_ids
    rows = Rows(
        token=np.asarray([r.prompt_ids[-1] for r in rs], np.int32),
        length=lengths,
        limit=np.asarray([len(r.prompt_ids) + r.sampling.max_tokens for r in rs], np.int32),
        live=np.ones(3, bool),
        stop_ids=stop_ids,
        sampling=sampling,
    )
    memory = Memory(target=cache, draft=draft_cache, features=features)
    return memory, rows, spec.Pending(tokens=pending, num=num), tokens


def run(drafter, weights, shape, memory, rows, pending, num_rounds=24):
    """(committed tokens, log-probs, tokens per round) of each row, and the memory."""
    params = tiny.tiny_params()

    @jax.jit
    def step(memory, rows, pending):
        cache, tree = spec.draft(params, weights, drafter, shape, memory.draft, memory.features, rows, pending, 0)
        memory = memory.replace(draft=None)
        memory, rows, pending, out = spec.verify(params, tiny.MODEL, (), True, shape.rule, memory, rows, tree, 0)
        return memory.replace(draft=cache), rows, pending, out

    outs = []
    for _ in range(num_rounds):
        memory, rows, pending, out = step(memory, rows, pending)
        outs.append(out)
    memory, out = jax.device_get((memory, jax.tree.map(lambda *x: np.stack(x), *outs)))
    tokens, logprobs, counts = [], [], []
    for i in range(3):
        kept = out.tokens[:, i] >= 0
        tokens.append(out.tokens[:, i][kept].tolist())
        logprobs.append(out.logprobs[:, i][kept])
        counts.append([int(n) for n in kept.sum(axis=1) if n])
    return tokens, logprobs, counts, memory


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strength", [-50.0, 2.0, 60.0], ids=["hopeless", "fair", "oracle"])
def test_equal_to_plain_decoding(shape, strength):
    """A1, A5, A6, A10, A11, A12, A26, A28: ragged rows, mixed temperatures, any acceptance, chains and trees."""
    memory, rows, pending, _ = start_state(shape)
    tokens, logprobs, counts, _ = run(table_drafter(answers(), strength), {}, shape, memory, rows, pending)
    for i, c in enumerate(plain()):
        assert tokens[i] == c.token_ids.tolist()
        np.testing.assert_allclose(logprobs[i], c.logprobs, atol=1e-4)
        assert sum(counts[i]) == len(c.token_ids)
    if strength == 60.0:  # every round but the first of the one-token prompt and the last commits the whole tree
        assert counts[1][:-1] == [shape.depth + 1] * (len(counts[1]) - 1)
    if strength == -50.0:
        assert set(counts[1]) == {1}


def test_real_drafters_and_their_cache_after_every_rejection():
    """A23, A24, A25: after many rounds the drafter's cache is that of one pass over the final tokens."""
    config = DraftConfig(target=tiny.MODEL)
    params = tiny.tiny_params()
    draft_params = tiny.lively(init_draft_params(config, jax.random.key(5)))
    drafter = make_draft_model(config)
    weights = prepare(draft_params, params, config)
    shape = spec.Shape(2, 16, 33)  # wide enough for a random drafter to be right at times
    memory, rows, pending, tokens = start_state(shape)
    start = rows.length - pending.num
    memory = memory.replace(draft=_ingest_all(config, draft_params, memory, tokens, start))
    got, _, counts, memory = run(drafter, weights, shape, memory, rows, pending)
    for i, c in enumerate(plain()):
        assert got[i] == c.token_ids.tolist()
    assert max(n for row in counts for n in row) > 1  # something was accepted, something was not
    assert min(n for row in counts for n in row) == 1
    _check_draft_cache(config, draft_params, memory, counts)


def _ingest_all(config, draft_params, memory, tokens, num_B) -> LayerCache:
    rolled = jnp.roll(jnp.asarray(tokens), -1, axis=1)[:, :16]
    _, cache = draft_forward_cached(
        draft_params, tiny.tiny_params(), config, memory.features[:, :16], rolled, jnp.zeros(3, jnp.int32), memory.draft
    )
    del num_B  # rows past it are overwritten by the pending ones
    return cache


def _check_draft_cache(config, draft_params, memory, counts) -> None:
    full = answers()
    positions = jnp.broadcast_to(jnp.arange(S), (3, S))
    hidden = forward(tiny.tiny_params(), tiny.MODEL, full, positions).hidden
    empty = init_cache(config.layer, 3, S, "float32")[0]
    _, right = draft_forward_cached(
        draft_params, tiny.tiny_params(), config, hidden, jnp.roll(full, -1, axis=1), jnp.zeros(3, jnp.int32), empty
    )
    for i, c in enumerate(plain()):
        # The last round's tokens were committed, not taken in.
        num = len(c.prompt_ids) - 1 + sum(counts[i][:-1])
        np.testing.assert_allclose(memory.draft.k[i][..., :num], right.k[i][..., :num], atol=1e-4)
        np.testing.assert_allclose(memory.draft.v[i][:, :num], right.v[i][:, :num], atol=1e-4)
        np.testing.assert_allclose(memory.features[i][:num], hidden[i][:num], atol=1e-4)


def test_reduced_vocabulary():
    """F3, A9: a drafter that can propose a part of the ids only changes no token."""
    model, params = tiny.MODEL, tiny.tiny_params()
    kept = np.arange(0, 90, 2)
    d2t = jnp.asarray(kept - np.arange(len(kept)), jnp.int32)
    config = DraftConfig(target=model, draft_vocab_size=len(kept))
    draft_params = init_draft_params(config, jax.random.key(1))
    weights = prepare(draft_params, params, config, d2t)
    assert weights["head"].shape == (len(kept), model.hidden_size)
    memory, rows, pending, _ = start_state(spec.Shape(2, 2, 4))
    tokens, _, _, _ = run(make_draft_model(config, d2t), weights, spec.Shape(2, 2, 4), memory, rows, pending)
    assert tokens == [c.token_ids.tolist() for c in plain()]
