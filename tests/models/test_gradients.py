"""Products in value and gradient, and recomputation of layers in the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models.config import ModelConfig
from tlt_jax.models.layers import product
from tlt_jax.models.transformer import forward, init_params, param_shapes

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    tie_embeddings=True,
)


@pytest.mark.parametrize("spec", ["...i,oi->...o", "btkgh,bskh->bkgts", "bkgts,bskh->btkgh"])
def test_product_is_plain_autodiff_in_f32(spec):
    shapes = {"b": 2, "t": 3, "k": 2, "g": 2, "h": 4, "s": 5, "i": 3, "o": 4}
    keys = jax.random.split(jax.random.key(0))
    inputs = spec.replace("...", "bt").split("->")[0].split(",")
    a, b = (jax.random.normal(key, [shapes[c] for c in names]) for key, names in zip(keys, inputs, strict=True))

    def through(multiply):
        loss = jax.value_and_grad(lambda a, b: jnp.sum(jnp.sin(multiply(spec, a, b))), argnums=(0, 1))
        return jax.jit(loss)(a, b)

    got, expected = through(product), through(jnp.einsum)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for x, y in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_backward_products_have_the_compute_dtype():
    """B19: bf16 operands, f32 sums: no product of the backward pass is in f32, no gradient of a sum is in bf16."""
    a, b = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((4, 16), jnp.bfloat16)
    grad = jax.grad(lambda a, b: jnp.sum(product("...i,oi->...o", a, b) ** 2), argnums=(0, 1))
    products = [eqn for eqn in _equations(jax.make_jaxpr(grad)(a, b).jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(products) == 3
    for eqn in products:
        assert {str(var.aval.dtype) for var in eqn.invars} == {"bfloat16"}
        assert str(eqn.outvars[0].aval.dtype) == "float32"


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _loss(params, tokens_BT, positions_BT, segment_ids_BT, remat, config=CONFIG):
    out = forward(
        params,
        config,
        tokens_BT,
        positions_BT,
        segment_ids_BT=segment_ids_BT,
        feature_layers=(0,),
        remat=remat,
    )
    return jnp.sum(jnp.sin(out.hidden)) + jnp.sum(jnp.cos(out.features[0]))


def test_recomputed_layers_change_neither_value_nor_gradient():
    params = init_params(CONFIG, jax.random.key(0))
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 12), 0, 64)
    positions_BT = jnp.array([[0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 0, 0]] * 2)
    segment_ids_BT = jnp.array([[1] * 5 + [2] * 3 + [0] * 4] * 2)
    step = jax.jit(jax.value_and_grad(_loss), static_argnums=4)
    value, grads = step(params, tokens_BT, positions_BT, segment_ids_BT, True)
    expected, expected_grads = step(params, tokens_BT, positions_BT, segment_ids_BT, False)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_shapes_for_another_platform_need_none_of_its_kernels():
    """A bf16 model for GPU has its shapes taken, and its segmented forward traced, on a machine without one."""
    config = ModelConfig(**{**CONFIG.__dict__, "dtype": "bfloat16", "platform": "gpu"})
    assert param_shapes(config) == param_shapes(CONFIG)
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    grads = jax.eval_shape(jax.grad(lambda *args: _loss(*args, True, config)), param_shapes(config), ids, ids, ids)
    assert grads == param_shapes(CONFIG)


def test_recomputed_layers_save_memory():
    """The compiler's own figure: layers are recomputed one after the other, not all at once."""
    config = ModelConfig(**{**CONFIG.__dict__, "num_layers": 4})
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    ids = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    step = jax.jit(jax.grad(_loss), static_argnums=(4, 5))
    temp = {
        remat: step.lower(params, ids, ids, ids, remat, config).compile().memory_analysis().temp_size_in_bytes
        for remat in (False, True)
    }
    assert temp[True] < 0.7 * temp[False]
