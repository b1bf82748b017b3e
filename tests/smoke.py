"""One product of each kind on an installed package that has nothing beside it: `make sdist-check`."""

import jax
import jax.numpy as jnp

import jaxlowbit

key = jax.random.key(0)
x = jax.random.normal(key, (3, 256), jnp.float32)
w = jax.random.normal(jax.random.key(1), (130, 256), jnp.float32)
for fmt in (jaxlowbit.FP8_128X128, jaxlowbit.FP8_CHANNEL, jaxlowbit.MXFP4, jaxlowbit.NVFP4):
    q = jaxlowbit.quantize(w, fmt)
    dot = jaxlowbit.fp4_dot if fmt in (jaxlowbit.MXFP4, jaxlowbit.NVFP4) else jaxlowbit.fp8_dot
    y = jax.jit(lambda x, q, dot=dot: dot(x, q, act=None, implementation="native"))(x, q)
    want = jnp.matmul(x, jaxlowbit.dequantize(q).T, precision="highest")
    error = float(jnp.max(jnp.abs(y - want)) / jnp.max(jnp.abs(want)))
    assert error < 1e-5, (fmt, error)
    print(f"{fmt.name}: native product within {error:.1e} of the dequantized one")
