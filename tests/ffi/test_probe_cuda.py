"""The CUDA library on a GPU: how FP4 buffers arrive, inside and outside a command buffer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowbit import _ffi

pytestmark = pytest.mark.gpu


def fp4(codes: np.ndarray) -> jax.Array:
    """A float4_e2m1fn array of these bit patterns."""
    return jax.lax.bitcast_convert_type(jnp.asarray(codes).astype(jnp.uint4), jnp.float4_e2m1fn)


def packed(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the low nibble first; an odd count leaves the last high nibble to the runtime."""
    padded = np.append(codes, np.zeros(codes.size % 2, np.uint8)).reshape(-1, 2)
    return padded[:, 0] | padded[:, 1] << 4


@pytest.mark.parametrize("count", [1, 2, 15, 16, 4097])
def test_fp4_arrives_packed_low_nibble_first(count: int) -> None:
    codes = np.arange(count, dtype=np.uint8) % 16
    got = np.asarray(jax.jit(_ffi.probe_fp4)(fp4(codes)))
    want = packed(codes)
    if count % 2:
        got, want = np.append(got[:-1], got[-1] & 15), np.append(want[:-1], want[-1] & 15)
    np.testing.assert_array_equal(got, want)


def test_repeated_calls_in_one_program() -> None:
    """Long enough for XLA to record a command buffer, and run with new inputs after it was recorded."""

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        total = jnp.zeros((8,), jnp.uint8)
        for _ in range(20):
            total = total ^ _ffi.probe_fp4(x)
            x = jnp.roll(x, 2)
        return total

    for seed in range(4):
        codes = np.random.default_rng(seed).integers(0, 16, 16, dtype=np.uint8)
        want = np.zeros(8, np.uint8)
        for step in range(20):
            want ^= packed(np.roll(codes, 2 * step))
        np.testing.assert_array_equal(np.asarray(chain(fp4(codes))), want)


def test_the_probe_sees_the_gpu() -> None:
    probe = _ffi.cuda_probe()
    assert "error" not in probe
    assert len(probe["devices"]) == len(jax.devices("gpu"))
    assert probe["driver"] is not None
