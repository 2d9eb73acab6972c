import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.parity_models import FAMILIES
from tests.rollout.tiny import MODEL, tiny_params
from tlt_jax.models.transformer import compute_logits, forward, param_shapes
from tlt_jax.sharding import (
    AXES,
    BATCH,
    PARAM_TABLE,
    MeshConfig,
    NamedSharding,
    make_mesh,
    param_shardings,
    path_str,
    publish,
    replicated,
    spec_for,
    worker_meshes,
)

TOKENS = np.random.default_rng(3).integers(4, 90, (8, 12)).astype(np.int32)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_matches_exactly_one_rule(name):
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(FAMILIES[name]))
    assert len(leaves) > 10
    for path, leaf in leaves:
        assert len(spec_for(path_str(path))) <= leaf.ndim


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match="got 0 rules for parameter 'layers_0/attn/q/lora', expected exactly one"):
        spec_for("layers_0/attn/q/lora")
    with pytest.raises(ValueError, match="got 2 rules for parameter 'embed/weight', expected exactly one"):
        spec_for("embed/weight", (*PARAM_TABLE, ("embed", P())))
    with pytest.raises(ValueError, match="got 0 rules for parameter 'extra'"):
        param_shardings({"extra": np.zeros(3)}, make_mesh(MeshConfig()))


def test_an_axis_that_does_not_divide_is_left_out():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    specs = jax.tree.map(lambda s: s.spec, param_shardings(param_shapes(MODEL), mesh, heads=MODEL.num_kv_heads))
    layer = specs["layers_0"]
    assert layer["mlp"]["gate"]["weight"] == P("tensor", "fsdp")  # [48, 32]
    assert layer["mlp"]["down"]["weight"] == P("fsdp", "tensor")
    assert layer["attn"]["q"]["weight"] == P(None, "fsdp")  # 2 key/value heads do not split over 4 devices
    assert layer["attn"]["o"]["weight"] == P("fsdp", None)
    assert layer["attn_norm"]["scale"] == P(None)
    odd = dataclasses.replace(MODEL, vocab_size=97)
    embed = param_shardings(param_shapes(odd), mesh)["embed"]["weight"]
    assert embed.spec == P(None, "fsdp") and embed.mesh is mesh


@functools.cache
def _expected():
    return _logits(tiny_params(), TOKENS)


@jax.jit
def _logits(params, tokens_BT):
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return compute_logits(params, MODEL, forward(params, MODEL, tokens_BT, positions_BT).hidden)


@pytest.mark.parametrize(
    "data, fsdp, tensor", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4), (2, 2, 2), (1, 2, 4), (1, 1, 8)]
)
def test_logits_do_not_depend_on_the_mesh(data, fsdp, tensor):
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor])
    params = jax.device_put(tiny_params(), param_shardings(tiny_params(), mesh, heads=MODEL.num_kv_heads))
    logits = _logits(params, jax.device_put(TOKENS, NamedSharding(mesh, BATCH)))
    assert len(logits.sharding.device_set) == data * fsdp * tensor
    np.testing.assert_allclose(logits, _expected(), atol=1e-5, rtol=1e-5)


def test_meshes_have_all_three_axes():
    devices = jax.devices()
    assert make_mesh(MeshConfig()).shape == {"data": 1, "fsdp": 8, "tensor": 1}
    assert make_mesh(MeshConfig(data=-1, fsdp=2, tensor=2)).shape == {"data": 2, "fsdp": 2, "tensor": 2}
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=2), devices[2:4])
    assert mesh.axis_names == AXES and list(mesh.devices.flat) == devices[2:4]


@pytest.mark.parametrize(
    "shape", [(1, 3, 1), (3, -1, 1), (-1, -1, 1), (0, -1, 1), (1, 0, 1), (1, -2, -4), (-2, 2, 2), (2, 2, 1)]
)
def test_bad_meshes_are_refused(shape):
    data, fsdp, tensor = shape
    with pytest.raises(
        ValueError, match=f"mesh: got data={data}, fsdp={fsdp}, tensor={tensor} for 8 devices; expected a"
    ):
        make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))


def test_workers_split_the_devices_or_share_them():
    devices = jax.devices()
    two = worker_meshes(devices, 2)
    assert [m.shape["tensor"] for m in two] == [4, 4]
    assert [d for m in two for d in m.devices.flat] == devices
    assert [m.devices.item() for m in worker_meshes(devices[:2], 3)] == [devices[0], devices[1], devices[0]]
    with pytest.raises(ValueError, match="workers: got 3 for 8 devices, expected a divisor of the devices"):
        worker_meshes(devices, 3)
    with pytest.raises(ValueError, match="workers: got 0, expected at least 1"):
        worker_meshes(devices, 0)


def test_publish_is_a_copy_even_into_the_same_sharding():
    """C13 and the donation trap: the learner's next update deletes its buffers, not the published ones."""
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    learner = jax.device_put({"embed": {"weight": jnp.arange(6.0).reshape(3, 2)}}, replicated(mesh))
    shardings = {"embed": {"weight": replicated(mesh)}}
    published = publish(learner, shardings, version=7)
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(learner)
    assert learner["embed"]["weight"].is_deleted()
    assert published.version == 7
    np.testing.assert_array_equal(published.params["embed"]["weight"], np.arange(6.0).reshape(3, 2))


def test_publish_reshards_and_casts():
    learner_mesh, worker = make_mesh(MeshConfig()), worker_meshes(jax.devices()[4:6], 1)[0]
    params = tiny_params()
    learner = jax.device_put(params, param_shardings(params, learner_mesh, heads=MODEL.num_kv_heads))
    shardings = param_shardings(params, worker, heads=MODEL.num_kv_heads)
    copy = publish(learner, shardings, 1, dtype="bfloat16").params
    for x, y, s in zip(*map(jax.tree.leaves, (params, copy, shardings)), strict=True):
        assert y.dtype == jnp.bfloat16 and y.sharding == s
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(x.astype(jnp.bfloat16), np.float32))
    assert publish(learner, shardings, 1).params["final_norm"]["scale"].dtype == jnp.float32
