"""More than 2**31 elements: offsets are 64 bits wide in the kernels."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlowbit as jlb

K, NEEDED = 32768, 14 << 30


def available() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/meminfo").exists() or available() < NEEDED, reason=f"needs {NEEDED >> 30} GiB of free memory"
    ),
]


def test_dot_past_two_to_the_31st_code() -> None:
    n = 70000
    codes = np.zeros((n, K), ml_dtypes.float8_e4m3fn)
    for row, column, value in ((0, 0, 1), (65535, K - 1, 2), (65536, 0, 4), (n - 1, 0, 8), (n - 1, K - 1, 16)):
        codes[row, column] = value
    y = np.asarray(jlb.fp8_dot(jnp.ones((1, K)), codes, 0.5, act=None, implementation="native"))[0]
    want = np.zeros(n, np.float32)
    want[[0, 65535, 65536, n - 1]] = 0.5, 1, 2, 12
    np.testing.assert_array_equal(y, want)


def test_quantize_past_two_to_the_31st_value() -> None:
    rows = 65600
    x = np.zeros((rows, K), ml_dtypes.bfloat16)
    x[65535, K - 1], x[65536, 0], x[rows - 1, K - 1] = 1, 2, 3
    q = jax.jit(lambda x: jlb.quantize(x, jlb.FP8_1X128, implementation="native"))(x)
    bytes_of = np.asarray(q.data).view(np.uint8)
    assert [bytes_of[65535, K - 1], bytes_of[65536, 0], bytes_of[rows - 1, K - 1]] == [0x7E] * 3
    assert int(np.count_nonzero(bytes_of[65535:])) == 3
    scales = np.asarray(q.scale)
    np.testing.assert_array_equal(
        scales[[65535, 65536, rows - 1], [-1, 0, -1]], np.float32([1, 2, 3]) / np.float32(448)
    )
