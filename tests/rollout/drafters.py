"""Drafters and policies to put engines to the test with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.rollout import tiny
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.decode import make_draft_model, prepare
from tlt_jax.drafter.model import init_draft_params
from tlt_jax.models.cache import LayerCache, init_cache
from tlt_jax.sharding import Versioned
from tlt_jax.strategy import Choice, Policy, parse
from tlt_jax.types import DraftModel

EAGLE = DraftConfig(target=tiny.MODEL)


def playing(*names: str, max_rounds: int | None = None) -> Policy:
    """Plays the named strategies in turn, whatever they are worth; the state counts calls and keeps outcomes."""
    strategies = tuple(parse(name) for name in names)

    def select(state, situation):
        allowed = [s for s in strategies if situation.allows(s)]
        choice = Choice(allowed[state["calls"] % len(allowed)] if allowed else parse("plain"), max_rounds)
        return choice, state | {"calls": state["calls"] + 1}

    return Policy(
        arms=lambda live: strategies,
        init=lambda: {"calls": 0, "outcomes": ()},
        select=select,
        update=lambda state, outcome: state | {"outcomes": (*state["outcomes"], outcome)},
        to_json=lambda state: {"calls": state["calls"]},
        from_json=lambda saved: {"calls": saved["calls"], "outcomes": ()},
    )


@functools.cache
def eagle_model(config: DraftConfig = EAGLE) -> DraftModel:
    """One object per configuration: engines that share a pool share its programs."""
    return make_draft_model(config)


@functools.cache
def eagle_weights(seed: int = 5, config: DraftConfig = EAGLE) -> Versioned:
    """A drafter that knows nothing."""
    draft_params = tiny.lively(init_draft_params(config, jax.random.key(seed)))
    return Versioned(prepare(draft_params, tiny.tiny_params(), config), version=seed)


_KEY_LEN = 4


def oracle(completions) -> DraftModel:
    """Knows every answer, and finds it by the tokens that it has taken in: they are all that its cache holds.

    So it is right only as long as every committed position reaches it, in its place.
    """
    keys = np.asarray([c.prompt_ids[1 : 1 + _KEY_LEN] for c in completions])
    width = max(len(c.prompt_ids) + len(c.token_ids) for c in completions) + 32
    answers = np.zeros((len(completions), width), np.int32)
    for i, c in enumerate(completions):
        full = [*c.prompt_ids, *c.token_ids]
        answers[i, : len(full)] = full

    def forward(weights, params, features, tokens, start, cache, positions, block_mask):
        del weights, params, block_mask
        put = jax.vmap(lambda k, t, i: jax.lax.dynamic_update_slice(k, t.astype(k.dtype)[None, None], (0, 0, i)))
        cache = LayerCache(k=put(cache.k, tokens, start), v=cache.v)
        held = cache.k[:, 0, 0, :_KEY_LEN].astype(jnp.int32)  # token t+1 at slot t
        which = jnp.argmax(jnp.all(held[:, None] == jnp.asarray(keys)[None], axis=2), axis=1)
        if positions is None:
            positions = start[:, None] + jnp.arange(tokens.shape[1])
        # Its own cache must agree with the answer up to this very position, or it says nothing useful.
        place = jnp.arange(cache.k.shape[-1])
        right = jnp.asarray(np.pad(answers, ((0, 0), (0, cache.k.shape[-1]))))[which][:, 1 : 1 + cache.k.shape[-1]]
        is_behind = jnp.any((cache.k[:, 0, 0].astype(jnp.int32) != right) & (place < start[:, None]), axis=1)
        h = jnp.zeros((*tokens.shape, tiny.MODEL.hidden_size))
        h = h.at[..., 0].set(jnp.where(is_behind, -1, which)[:, None]).at[..., 1].set(positions)
        return h, cache

    def logits(weights, params, h):
        del weights, params
        which, position = h[..., 0].astype(jnp.int32), h[..., 1].astype(jnp.int32) + 2
        token = jnp.asarray(answers)[jnp.maximum(which, 0), jnp.minimum(position, width - 1)]
        return jnp.where((which >= 0)[..., None], 80.0 * jax.nn.one_hot(token, tiny.VOCAB), 0.0)

    def empty_cache(num_rows, capacity, dtype):
        return init_cache(tiny.MODEL, num_rows, capacity, dtype)[0]

    return DraftModel(forward, logits, lambda ids: ids, tiny.VOCAB, empty_cache)
