import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout import tiny
from tests.rollout.tiny import check, make_engine, prompt, request
from tlt_jax.models.cache import cache_bytes, cache_shapes, put_row
from tlt_jax.rollout import steps
from tlt_jax.rollout.config import RolloutConfig
from tlt_jax.rollout.executables import ExecutablePool
from tlt_jax.rollout.memory import Memory
from tlt_jax.rollout.sampling import SamplingArrays


def _get(pool, n):
    return pool.get(("add", n), lambda x: x + n, lambda: (jax.ShapeDtypeStruct((n,), jnp.float32),))


def test_a_program_is_compiled_once_and_counted():
    pool = ExecutablePool()
    program = _get(pool, 2)
    assert _get(pool, 2) is program
    np.testing.assert_array_equal(program(np.ones(2, np.float32)), [3.0, 3.0])
    _get(pool, 3)
    assert (len(pool), pool.stats.num_compiled, pool.stats.evicted) == (2, 2, 0)
    assert ("add", 2) in pool and ("add", 4) not in pool
    assert pool.stats.compile_s > 0


def test_the_least_recently_used_program_goes_first():
    pool = ExecutablePool(max_programs=2)
    first, _ = _get(pool, 1), _get(pool, 2)
    _get(pool, 1)
    _get(pool, 3)
    assert ("add", 2) not in pool and _get(pool, 1) is first
    assert (len(pool), pool.stats.num_compiled, pool.stats.evicted) == (2, 3, 1)
    _get(pool, 2)
    assert (len(pool), pool.stats.num_compiled, pool.stats.evicted) == (2, 4, 2)
    with pytest.raises(ValueError, match=r"executables.max_programs: got 0, expected at least 1"):
        ExecutablePool(0)


def test_threads_that_share_a_pool_compile_once():
    pool, seen = ExecutablePool(), []
    threads = [threading.Thread(target=lambda: seen.append(_get(pool, 5))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(map(id, seen))) == 1 and pool.stats.num_compiled == 1


def test_an_engine_uses_the_pool_it_is_given():
    pool = ExecutablePool()  # empty, which must not be mistaken for none
    engine = make_engine()
    assert type(engine)(engine.model, engine.config, pool=pool).pool is pool


def test_prompts_of_any_length_share_the_programs_of_their_bucket():
    """H4: 56 prompts of 5..60 tokens need one program of each kind; other prompts after them need none."""
    engine = make_engine(max_live=1, max_len=64, prefill_rows=1, fresh_pool=True)
    requests = [request(i, prompt(i, 5 + i), max_tokens=1 + i % 4) for i in range(56)]
    check(engine.generate(requests), requests)
    assert len(engine.pool) == 4  # alloc, prefill, put, decode
    assert (
        engine.warm_up() == engine.pool.stats.num_compiled == 4
    )  # nothing new: a warm-up compiles no more than needed
    again = [request(100 + i, prompt(500 + i, 60 - i), max_tokens=1 + i % 4) for i in range(56)]
    check(engine.generate(again), again)
    assert engine.pool.stats.num_compiled == 4


def test_nothing_compiles_after_a_warm_up():
    """H4: growing and shrinking batches and caches included; the warm-up leaves no trace in the counts or rows."""
    engine = make_engine(max_live=2, max_len=128, prefill_rows=1)
    engine.warm_up()
    assert (engine.stats.tokens, engine.stats.prefill_tokens, engine.stats.resizes) == (0, 0, 0)
    num_compiled = engine.pool.stats.num_compiled
    lengths = [(3, 90), (70, 4), (1, 1), (40, 60), (100, 9), (17, 30), (2, 100)]
    requests = [request(i, prompt(i, n), ignore_eos=True, max_tokens=m) for i, (n, m) in enumerate(lengths)]
    check(engine.generate(requests[:3]), requests[:3])
    check(engine.generate(requests), requests)
    assert engine.stats.resizes >= 4
    assert engine.pool.stats.num_compiled == num_compiled


def test_a_warm_up_needs_an_idle_engine():
    engine = make_engine()
    engine.submit([request(0, (4, 5))])
    with pytest.raises(ValueError, match=r"engine.warm_up: got requests in progress, expected an idle engine"):
        engine.warm_up()
    engine.abort()


def test_bucket_lists():
    config = RolloutConfig(max_live=5, max_len=300, min_kv=64, prefill_rows=3)
    assert config.batch_buckets == (1, 2, 4, 8) and config.prefill_buckets == (1, 2, 4)
    assert config.kv_buckets == (64, 128, 256, 320)
    assert RolloutConfig(max_len=500, min_kv=100, kv_growth=1.5).kv_buckets == (128, 192, 256, 384, 512)
    assert RolloutConfig(max_len=10, min_kv=999).kv_buckets == (64,)


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("max_live", 0, ">= 1"),
        ("max_len", 1, ">= 2"),
        ("min_kv", 0, ">= 1"),
        ("kv_growth", 1.0, "> 1"),
        ("prefill_rows", 0, ">= 1"),
        ("prefill_chunk", 0, ">= 1"),
        ("rounds_per_dispatch", 0, ">= 1"),
        ("refill_frac", 1.5, r"in \[0, 1\]"),
        ("cache_dtype", "int8", "'', 'float32' or 'bfloat16'"),
        ("max_programs", 0, ">= 1"),
    ],
)
def test_bad_settings_are_refused(field, value, expected):
    with pytest.raises(ValueError, match=f"rollout.{field}: got {value!r}, expected {expected}"):
        RolloutConfig(**{field: value})


def _decode_shapes(num_rows, capacity):
    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct((num_rows, *dims), dtype)

    sampling = SamplingArrays(
        key=shape("uint32", 2),
        temperature=shape("float32"),
        top_k=shape("int32"),
        top_p=shape("float32"),
        min_p=shape("float32"),
    )
    rows = steps.Rows(
        token=shape("int32"),
        length=shape("int32"),
        limit=shape("int32"),
        live=shape("bool"),
        stop_ids=shape("int32", steps.MAX_STOP_IDS),
        sampling=sampling,
    )
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny.tiny_params())
    scalar = jax.ShapeDtypeStruct((), "int32")
    return params, Memory(target=cache_shapes(tiny.MODEL, num_rows, capacity, "float32")), rows, scalar, scalar


@pytest.mark.parametrize("num_rows", [1, 4])
def test_no_program_copies_the_cache(num_rows):
    """The donated cache is the one that comes back, and the temporaries of several rounds are smaller than it."""
    capacity = 4096
    num_bytes = cache_bytes(tiny.MODEL, num_rows, capacity, "float32")

    def decode(params, memory, rows, max_rounds, exit_live):
        return steps.decode(params, tiny.MODEL, (), 4, False, memory, rows, max_rounds, exit_live)

    shapes = _decode_shapes(num_rows, capacity)
    program = jax.jit(decode, donate_argnums=1).lower(*shapes).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes
    assert memory.temp_size_in_bytes < num_bytes / 4
    assert not re.search(rf"f32\[({num_rows},)?2,8,{capacity}\]\S* copy\(", program.as_text())

    source, row = cache_shapes(tiny.MODEL, 1, 1024, "float32"), jax.ShapeDtypeStruct((), "int32")
    memory = jax.jit(put_row, donate_argnums=0).lower(shapes[1].target, source, row).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes and memory.temp_size_in_bytes < num_bytes / 100


def test_the_pool_states_its_bytes():
    pool = ExecutablePool()
    assert pool.num_bytes() == 0
    _get(pool, 2)
    one = pool.num_bytes()
    _get(pool, 3)
    assert 0 < one < pool.num_bytes() < 3 * one
