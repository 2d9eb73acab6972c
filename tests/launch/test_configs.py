"""Every config: it builds and says what a reader needs; the large ones shard and lower without weights."""

import ast
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from launch.config import load_config, to_json
from launch.run_config import SCHEMA, RunConfig, make_run_config
from tlt_jax.models.cache import cache_shapes
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import param_shapes
from tlt_jax.rl.batch import MicroBatch
from tlt_jax.rl.steps import make_steps
from tlt_jax.rollout import sampling, steps
from tlt_jax.rollout.memory import Memory
from tlt_jax.sharding import make_mesh, param_shardings, worker_meshes

CONFIGS = sorted(
    path for path in (pathlib.Path(__file__).parents[2] / "configs").glob("*.py") if path.stem != "__init__"
)

QWEN_7B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 131072, "eos_token_id": 151643,
}  # fmt: skip
QWEN_32B = QWEN_7B | {
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_70B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "rope_theta": 5e5,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
# Published `config.json` of each large model, and its number of parameters in thousands of millions.
LARGE = {
    "qwen2_5_7b": (QWEN_7B, 7.616),
    "r1_distill_qwen_7b": (QWEN_7B | {"rope_theta": 1e4}, 7.616),
    "qwen2_5_32b": (QWEN_32B, 32.764),
    "llama3_3_70b": (LLAMA_70B, 70.554),
}


def _run(name: str) -> RunConfig:
    path = next(path for path in CONFIGS if path.stem == name)
    return make_run_config(load_config(str(path), [], SCHEMA))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_builds_and_says_how_to_run_it(path):
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert [word for word in ("Command:", "Hardware:", "Expect:") if word not in doc] == []
    assert f"--config=configs/{path.name}" in doc
    resolved = to_json(_run(path.stem))
    assert json.loads(json.dumps(resolved)) == resolved
    longest = resolved["task"]["max_prompt_tokens"] + resolved["sampling"]["max_tokens"]
    assert longest <= resolved["rollout"]["max_len"]


def test_the_large_configs_take_the_published_settings():
    run = _run("qwen2_5_32b")
    assert (run.loop.prompts_per_step, run.loop.group_size, run.sampling.max_tokens) == (256, 8, 32768)
    assert (run.algorithm.clip_low, run.algorithm.clip_high, run.algorithm.kl_coef) == (0.2, 0.2, 0.001)
    assert (run.algorithm.kl_estimator, run.optimizer.learning_rate, run.sampling.temperature) == ("k3", 1e-6, 0.9)
    assert _run("r1_distill_qwen_7b").loop.prompts_per_step == 64


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_shards_over_eight_devices_from_shapes(name):
    """Every parameter matches one rule, and an eighth of the model lies on each device."""
    run, (hf, billions) = _run(name), LARGE[name]
    model = ModelConfig.from_hf(hf, dtype=run.model.dtype)
    shapes = param_shapes(model)
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert count / 1e9 == pytest.approx(billions, abs=5e-4)
    shardings = param_shardings(shapes, make_mesh(run.mesh), heads=model.num_kv_heads)
    shards = jax.tree.map(lambda leaf, sharding: int(np.prod(sharding.shard_shape(leaf.shape))), shapes, shardings)
    assert sum(jax.tree.leaves(shards)) / count == pytest.approx(1 / 8, rel=2e-3)
    (worker, *_) = worker_meshes(jax.devices(), run.workers.num_workers)
    assert worker.shape["tensor"] == 8 // run.workers.num_workers


def _lower_update(run: RunConfig, model: ModelConfig) -> export.Exported:
    """The learner's forward and backward pass over one micro-batch of the longest rows."""
    mesh = make_mesh(run.mesh)
    learner = make_steps(model, run.algorithm, run.optimizer, run.learner, mesh)
    params = learner.state_shapes.params
    grads, sums = jax.eval_shape(learner.zeros)
    grads = jax.tree.map(lambda g, p: jax.ShapeDtypeStruct(g.shape, g.dtype, sharding=p.sharding), grads, params)
    shape = (mesh.shape["data"] * mesh.shape["fsdp"], run.rollout.max_len)
    ints, floats, bools = (jax.ShapeDtypeStruct(shape, dtype) for dtype in ("int32", "float32", "bool"))
    micro = MicroBatch(
        tokens=ints, positions=ints, segment_ids=ints, slots=ints, targets=ints, mask=bools, segments=ints,
        row_index=ints, behaviour_logprobs=floats, advantages=floats, weights=floats,
    )  # fmt: skip
    scalars = jax.ShapeDtypeStruct((), "bool"), jax.ShapeDtypeStruct((), "float32")
    return export.export(learner.accumulate, platforms=["cuda"])(params, grads, sums, micro, floats, floats, *scalars)


def _lower_decode(run: RunConfig, model: ModelConfig) -> export.Exported:
    """The rollout's decoding rounds with a full batch and the longest cache, on one worker's devices."""
    (mesh, *_) = worker_meshes(jax.devices(), run.workers.num_workers)
    shapes = param_shapes(model)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=sharding),
        shapes,
        param_shardings(shapes, mesh, heads=model.num_kv_heads),
    )
    B = run.rollout.max_live

    def column(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((B, *shape), dtype)

    law = sampling.SamplingArrays(
        key=column("uint32", 2),
        temperature=column("float32"),
        top_k=column("int32"),
        top_p=column("float32"),
        min_p=column("float32"),
    )
    rows = steps.Rows(
        token=column("int32"),
        length=column("int32"),
        limit=column("int32"),
        live=column("bool"),
        stop_ids=column("int32", steps.MAX_STOP_IDS),
        sampling=law,
    )

    def decode(params, memory, rows, max_rounds, exit_live):
        num_rounds = run.rollout.rounds_per_dispatch
        return steps.decode(params, model, (), num_rounds, False, memory, rows, max_rounds, exit_live)

    cache = cache_shapes(model, B, run.rollout.max_len, run.model.dtype)
    count = jax.ShapeDtypeStruct((), "int32")
    return export.export(jax.jit(decode, donate_argnums=1), platforms=["cuda"])(
        params, Memory(target=cache), rows, count, count
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LARGE if name != "r1_distill_qwen_7b"])
def test_a_large_model_lowers_for_cuda(name):
    """Both programs that a run spends its time in, with all layers, for the devices of the config's meshes."""
    run = _run(name)
    model = ModelConfig.from_hf(LARGE[name][0], dtype=run.model.dtype)
    update = _lower_update(run, model)
    assert (update.platforms, update.nr_devices) == (("cuda",), 8)
    assert len(update.out_avals) > model.num_layers
    decode = _lower_decode(run, model)
    assert (decode.platforms, decode.nr_devices) == (("cuda",), 8 // run.workers.num_workers)
    tokens = decode.out_avals[-3]
    assert (tokens.shape, tokens.dtype) == ((run.rollout.rounds_per_dispatch, run.rollout.max_live), jnp.int32)
