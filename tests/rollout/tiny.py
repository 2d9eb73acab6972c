"""A tiny decoder with lively logits, engines that share compiled programs, and an oracle for completions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import compute_logits, forward, init_params
from tlt_jax.rollout.config import RolloutConfig
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.rollout.executables import ExecutablePool
from tlt_jax.rollout.noise import gumbel, request_key
from tlt_jax.sharding import param_shardings, publish, worker_meshes
from tlt_jax.types import Completion, Params, Request, SamplingParams

SEED = 11
VOCAB = 96
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    qk_norm=True,
    num_valid_tokens=90,
    eos_token_ids=(2, 3),
    model_type="qwen3",
)
_ORACLE_ROWS, _ORACLE_LEN = 8, 128


def lively(params: Params) -> Params:
    """Rescales random weights so that logits differ by nats and depend on the whole prefix."""

    def scale(path, x):
        name = jax.tree_util.keystr(path)
        if "scale" in name or "bias" in name:
            return x
        return x / 0.02 * (1.0 if "embed" in name else 2.0 / np.sqrt(x.shape[-1]))

    return jax.tree_util.tree_map_with_path(scale, params)


@functools.cache
def tiny_params(model: ModelConfig = MODEL) -> Params:
    return lively(init_params(model, jax.random.key(0)))


@functools.cache
def shared_pool(_devices) -> ExecutablePool:
    """One pool for all engines on the same devices."""
    return ExecutablePool()


def make_engine(mesh=None, seed=SEED, version=1, decode_text=None, fresh_pool=False, worker=0, parts=None, **config):
    """`parts` are further arguments of the engine: drafter, bandit, ngram, trace_sink."""
    fields = {"max_live": 4, "max_len": 96, "min_kv": 64, "prefill_rows": 2, "prefill_chunk": 16}
    fields |= {"rounds_per_dispatch": 4} | config
    mesh = mesh or worker_meshes(jax.devices()[:1], 1)[0]
    pool = None if fresh_pool else shared_pool(tuple(mesh.devices.flat))
    engine = RolloutEngine(
        MODEL,
        RolloutConfig(**fields),
        seed=seed,
        mesh=mesh,
        decode_text=decode_text,
        worker=worker,
        pool=pool,
        **(parts or {}),
    )
    shardings = param_shardings(tiny_params(), engine.mesh, heads=MODEL.num_kv_heads)
    engine.load(publish(tiny_params(), shardings, version))
    return engine


def prompt(prompt_id: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng([prompt_id, length]).integers(4, 90, length).tolist())


def request(request_id: int, prompt_ids, sample: int = 0, prompt_id: int = 0, **sampling) -> Request:
    fields = {"max_tokens": 12} | sampling
    return Request(
        request_id=request_id,
        prompt_id=prompt_id,
        prompt_ids=prompt_ids,
        sample=sample,
        sampling=SamplingParams(**fields),
    )


def tokens_of(completions) -> dict[int, list[int]]:
    return {c.request_id: c.token_ids.tolist() for c in completions}


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens_BT):
    """f32[B,T,V] of a full forward, right padding."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return compute_logits(params, model, forward(params, model, tokens_BT, positions_BT).hidden)


@jax.jit
def _noise(key_B2, position_BT):
    key_BT2 = jnp.broadcast_to(key_B2[:, None], (*position_BT.shape, 2))
    return gumbel(key_BT2, position_BT, VOCAB)


def full_logits(rows, params=None) -> np.ndarray:
    """f32[rows,T,V], uncached; rows are lists of ids."""
    out = []
    for i in range(0, len(rows), _ORACLE_ROWS):
        part = rows[i : i + _ORACLE_ROWS]
        tokens = np.zeros((_ORACLE_ROWS, _ORACLE_LEN), np.int32)
        for j, row in enumerate(part):
            tokens[j, : len(row)] = row
        out.append(np.asarray(_logits(MODEL, params or tiny_params(), tokens))[: len(part)])
    return np.concatenate(out)


def position_noise(request_ids, seed=SEED) -> np.ndarray:
    """f32[rows,T,V], the noise of each request at each absolute position."""
    out = []
    for i in range(0, len(request_ids), _ORACLE_ROWS):
        part = request_ids[i : i + _ORACLE_ROWS]
        keys = np.zeros((_ORACLE_ROWS, 2), np.uint32)
        keys[: len(part)] = [request_key(seed, r) for r in part]
        positions = np.broadcast_to(np.arange(_ORACLE_LEN, dtype=np.int32), (_ORACLE_ROWS, _ORACLE_LEN))
        out.append(np.asarray(_noise(keys, positions))[: len(part)])
    return np.concatenate(out)


def law(logits_V: np.ndarray, s: SamplingParams) -> np.ndarray:
    """Log-probabilities in f64 of the law that a token is drawn from; -inf where cut."""
    z = np.asarray(logits_V, np.float64) / (s.temperature or 1.0)
    z[z < -1e20] = -np.inf
    if s.top_k:
        z = np.where(z >= np.sort(z)[-min(s.top_k, len(z))], z, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[(np.cumsum(p[order]) - p[order] < s.top_p) | (s.top_p == 1.0)]
    z = np.where(np.isin(np.arange(len(z)), kept) & (p >= s.min_p * p.max()), z, -np.inf)
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def choose(logits_V: np.ndarray, noise_V: np.ndarray, s: SamplingParams) -> np.ndarray:
    """f64[V]; the arg-max is the token to draw."""
    log_p = law(logits_V, s)
    return log_p + noise_V if s.temperature > 0 else log_p


def check(completions: list[Completion], requests: list[Request], decode_text=None, eos=MODEL.eos_token_ids) -> None:
    """Each completion is the one and only right answer to its request.

    Its tokens are those of a loop without a cache (teacher-forced: token i given the tokens before it), log-probs
    agree with that forward to 1e-4, and it ends exactly where a stop id, a stop string or the cap says.
    """
    assert [c.request_id for c in completions] == [r.request_id for r in requests]
    logits = full_logits([[*c.prompt_ids, *c.token_ids] for c in completions])
    noise = position_noise([c.request_id for c in completions])
    for i, (c, r) in enumerate(zip(completions, requests, strict=True)):
        s, first, n = r.sampling, len(r.prompt_ids), len(c.token_ids)
        assert c.prompt_ids == r.prompt_ids and (c.prompt_id, c.sample) == (r.prompt_id, r.sample)
        assert len(c.logprobs) == n and 1 <= n <= s.max_tokens
        for j, token in enumerate(c.token_ids):
            score = choose(logits[i, first + j - 1], noise[i, first + j], s)
            assert score[token] >= score.max() - 1e-4, (r, j, token, int(score.argmax()))
            np.testing.assert_allclose(c.logprobs[j], law(logits[i, first + j - 1], s)[token], atol=1e-4)
        stop_ids = {*s.stop_token_ids, *(() if s.ignore_eos else eos)}
        assert not stop_ids & set(c.token_ids[:-1].tolist())
        stopped = int(c.token_ids[-1]) in stop_ids
        if s.stop:
            text = [decode_text(c.token_ids[:k].tolist()) for k in (n - 1, n)]
            assert not any(x in text[0] for x in s.stop)
            stopped |= any(x in text[1] for x in s.stop)
        assert stopped or n == s.max_tokens
        assert c.finish_reason == ("stop" if stopped else "length")
        assert c.rounds + c.accepted >= n


def with_sampling(r: Request, **fields) -> Request:
    return dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, **fields))
