"""The CPU quantizer against the rules in quantize_model.py, bit for bit, on every tier that this machine runs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit import _ffi, formats
from jaxlowbit._ffi import Element, ScaleKind, ScaleRounding, Tier
from tests.ffi import quantize_model as model
from tests.ffi.quantize_model import Case

F32 = np.float32
TIERS = [tier for tier in _ffi.available_tiers() if tier not in (Tier.AUTO, Tier.AMX)]
ELEMENTS = [Element.E4M3, Element.E5M2, Element.E2M1]
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
KINDS = [
    (ScaleKind.F32, ScaleRounding.NONE),
    (ScaleKind.F32, ScaleRounding.POW2),
    (ScaleKind.E8M0, ScaleRounding.RCEIL),
    (ScaleKind.E8M0, ScaleRounding.FLOOR),
    (ScaleKind.E8M0, ScaleRounding.CEIL),
    (ScaleKind.E8M0, ScaleRounding.EVEN),
    (ScaleKind.E4M3, ScaleRounding.NONE),
]
# (B, R, C), block: exact and partial blocks, odd ones, single values, whole extents, more blocks than one group
GEOMETRIES = [
    ((1, 3, 256), (1, 128)),
    ((2, 5, 330), (1, 128)),
    ((1, 131, 258), (128, 128)),
    ((3, 7, 96), (1, 32)),
    ((1, 2, 1200), (1, 16)),
    ((2, 9, 70), (4, 7)),
    ((1, 6, 62), (1, 1)),
    ((2, 5, 74), (5, 74)),
    ((1, 4, 30), (3, 64)),
    ((1, 1, 2), (1, 3)),
]

pytestmark = pytest.mark.skipif(not TIERS, reason="the CPU library is not loaded")


def config(case: Case, tier: Tier) -> _ffi.QuantizeConfig:
    return _ffi.QuantizeConfig(
        element=case.element,
        scale_kind=case.kind,
        block_r=case.block[0],
        block_c=case.block[1],
        scale_rounding=case.rounding,
        stochastic=int(case.rng is not None),
        given=int(case.given is not None),
        tier=tier,
        amax_ub=case.amax_ub,
    )


def optional(array: np.ndarray | None) -> jax.Array | None:
    return None if array is None else jnp.asarray(array)


def check(x: np.ndarray, cases: list[Case], tiers: list[Tier] = TIERS) -> None:
    """All cases on all tiers in one program, since compiling is what costs time."""

    @jax.jit
    def run(x: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        return [
            _ffi.quantize(
                x,
                optional(case.given),
                optional(case.global_scale),
                None if case.rng is None else jnp.asarray(case.rng_words()),
                config=config(case, tier),
            )
            for case in cases
            for tier in tiers
        ]

    results = iter(run(jnp.asarray(x)))
    for case in cases:
        codes, scale = model.quantize(x, case)
        for tier in tiers:
            got_codes, got_scale = (np.asarray(a) for a in next(results))
            label = f"{tier.name} {case}"
            bits = np.uint32 if case.kind == ScaleKind.F32 else np.uint8
            np.testing.assert_array_equal(got_scale.view(bits), scale.view(bits), err_msg=f"scale, {label}")
            np.testing.assert_array_equal(got_codes.view(np.uint8), codes, err_msg=f"codes, {label}")


def adversarial(shape: tuple[int, ...], block: tuple[int, int], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    """Each block its own power of two; then zeros of both signs, a zero block, one huge value, some subnormals."""
    rng = np.random.default_rng(seed)
    grid = (shape[0], -(-shape[1] // block[0]), -(-shape[2] // block[1]))
    low, high = (-9, 5) if dtype == np.float16 else (-40, 40)
    power = np.exp2(rng.integers(low, high, grid).astype(np.float64))
    power.flat[rng.integers(power.size)] = 0.0
    x = rng.standard_normal(shape) * model.spread(power, block, shape)
    flat = x.reshape(-1)
    flat[rng.integers(0, flat.size, flat.size // 16)] = 0.0
    flat[rng.integers(0, flat.size, flat.size // 16)] = -0.0
    flat[rng.integers(0, flat.size, 2)] = (1e-40, -1e-39)
    flat[rng.integers(flat.size)] = 60000.0 if dtype == np.float16 else 3e38
    return x.astype(dtype)


def global_for(x: np.ndarray, element: Element) -> np.ndarray:
    amax = np.abs(x.astype(F32)).max((1, 2)).reshape(-1, 1)
    return np.maximum(amax / (F32(448) * model.largest(element)), model.TINY).astype(F32)


@pytest.mark.parametrize(("shape", "block"), GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_every_scale_kind(element: Element, dtype: np.dtype, shape: tuple[int, ...], block: tuple[int, int]) -> None:
    x = adversarial(shape, block, dtype)
    cases = [Case(element, kind, rounding, block) for kind, rounding in KINDS]
    cases.append(dataclasses.replace(cases[-1], global_scale=global_for(x, element)))
    check(x, cases)


def edges(element: Element) -> np.ndarray:
    """Every value of the element, every midpoint of neighbors, past the end, and the two floats next to each."""
    width = 3 if element == Element.E2M1 else 7
    values = np.arange(1 << width, dtype=np.uint8).view(model.TYPES[element]).astype(F32)
    values = values[np.isfinite(values)]
    top = values[-1]
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [top * F32(1.03), top * F32(1.1), top * 2]])
    points = np.concatenate([points, np.nextafter(points, F32(np.inf)), np.nextafter(points, F32(-1))])
    return np.concatenate([points, -points]).astype(F32)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_values_and_midpoints(element: Element) -> None:
    x = edges(element)
    x = np.resize(x, x.size + x.size % 2)[None, None]
    one = np.ones((1, 1, 1), F32)
    block = (1, x.shape[2])
    check(
        x,
        [
            Case(element, ScaleKind.F32, block=block, given=one),
            Case(element, ScaleKind.E8M0, block=block, given=np.full((1, 1, 1), 127, np.uint8)),
            Case(element, ScaleKind.E4M3, block=block, given=one.astype(ml_dtypes.float8_e4m3fn)),
        ],
    )


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_quotients_next_to_midpoints(element: Element) -> None:
    """Computed scales of arbitrary mantissa: the quotient must be the IEEE one, or ties fall to the wrong side."""
    points = edges(element)
    points = points[np.abs(points) <= model.largest(element)]
    scale = np.random.default_rng(1).uniform(1, 2, 300).astype(F32)[:, None] * F32(2.0**-7)
    x = (points[None] * scale).astype(F32)
    x = np.concatenate([x, np.nextafter(x, F32(np.inf)), np.nextafter(x, F32(-np.inf))], axis=1)
    x[:, 0] = scale[:, 0] * model.largest(element)
    x = x[None, :, : x.shape[1] // 2 * 2]
    assert np.abs(x).max() > 0
    check(x, [Case(element, ScaleKind.F32, block=(1, x.shape[2]))])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_all_16_bit_inputs(dtype: np.dtype) -> None:
    """Every bf16 and f16 pattern, NaNs of all payloads among them (in f32: the same high halves)."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    x = (bits << 16).view(F32) if dtype == np.float32 else bits.astype(np.uint16).view(dtype)
    x = x.reshape(1, 512, 128)
    check(x, [Case(e, ScaleKind.F32, block=(1, 128), given=np.full((1, 512, 1), 0.75, F32)) for e in ELEMENTS])
    check(x, [Case(e, kind, rounding, (1, 8)) for e in ELEMENTS for kind, rounding in KINDS[::2]])


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_inf_and_nan_spoil_their_block_alone(element: Element) -> None:
    x = np.random.default_rng(2).standard_normal((2, 4, 64)).astype(F32)
    x[0, 0, 3], x[0, 1, 40], x[1, 2, 17], x[1, 3, 63] = np.nan, np.inf, -np.inf, -np.nan
    for dtype in DTYPES.values():
        cases = [Case(element, kind, rounding, (1, 16)) for kind, rounding in KINDS]
        cases += [dataclasses.replace(case, amax_ub=1.0) for case in cases]
        check(x.astype(dtype), cases)
    case = Case(element, *KINDS[0], (1, 16))
    _, scale = _ffi.quantize(jnp.asarray(x), None, None, None, config=config(case, TIERS[0]))
    assert np.isnan(np.asarray(scale)).sum() == 4


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_amax_bound(element: Element) -> None:
    x = adversarial((1, 6, 64), (2, 32), DTYPES["f32"])
    for bound in (1.0, 2.0**-126, 3e38):
        check(x, [Case(element, kind, rounding, (2, 32), amax_ub=bound) for kind, rounding in KINDS])


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_tiny_and_huge_blocks(element: Element) -> None:
    """Blocks around both ends of float32: scales at their floor, E8M0 byte 0, quotients that over- or underflow."""
    power = np.concatenate([np.arange(-149, -95), np.arange(96, 128)]).astype(np.float64)
    x = np.random.default_rng(3).uniform(-1.999, 1.999, (1, len(power), 32)) * np.exp2(power)[None, :, None]
    check(x.astype(F32), [Case(element, kind, rounding, (1, 16)) for kind, rounding in KINDS])


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_given_scales(element: Element) -> None:
    """Any scale: zeros, subnormals, negative ones, NaN, infinity, all E8M0 bytes, all E4M3 codes."""
    x = np.random.default_rng(4).standard_normal((1, 256, 16)) * np.exp2(np.arange(256) / 8 - 16)[None, :, None]
    x[:, :, :6] = (0.0, -0.0, np.nan, np.inf, -np.inf, 1e-39)
    x = x.astype(F32)
    odd = np.array(
        [0.0, -0.0, 1e-40, -1e-40, -0.3, np.nan, np.inf, -np.inf, 2.0**-126, 3e38, -(2.0**-126), 2.0**127], F32
    )
    f32 = np.resize(odd, (1, 256, 1))
    byte = np.arange(256, dtype=np.uint8).reshape(1, 256, 1)
    e4m3 = byte.view(ml_dtypes.float8_e4m3fn)
    cases = [
        Case(element, ScaleKind.F32, block=(1, 16), given=f32),
        Case(element, ScaleKind.E8M0, block=(1, 16), given=byte),
        Case(element, ScaleKind.E4M3, block=(1, 16), given=e4m3),
        Case(element, ScaleKind.E4M3, block=(1, 16), given=e4m3, global_scale=np.full((1, 1), 0.37, F32)),
    ]
    cases += [dataclasses.replace(case, rng=(5, 6, 7)) for case in cases]
    check(x, cases)


@pytest.mark.parametrize("value", [2.0**-126, 1e-40, 1e-30, 2.0**-64, 1.0, 1e30, 3e38, np.inf, np.nan, 0.0])
def test_global_scales(value: float) -> None:
    x = adversarial((2, 3, 64), (1, 16), DTYPES["f32"], seed=5)
    outer = np.array([[value], [1.0]], F32)
    check(x, [Case(e, ScaleKind.E4M3, block=(1, 16), global_scale=outer) for e in ELEMENTS])


def test_threefry_vectors() -> None:
    """Random123's known answers for threefry2x32 with 20 rounds."""
    counter = np.array([0, 0x243F6A8885A308D3, 0xFFFFFFFFFFFFFFFF], np.uint64)
    keys = [(0, 0), (0x13198A2E, 0x03707344), (0xFFFFFFFF, 0xFFFFFFFF)]
    words = [int(model.threefry(*key, counter[i : i + 1])[0]) for i, key in enumerate(keys)]
    assert words == [0x6B200159, 0xC4923A9C, 0x1CB996FC]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_stochastic_rounding(element: Element, dtype: np.dtype) -> None:
    x = adversarial((2, 9, 70), (4, 35), dtype, seed=6)
    seeds = [(1, 2, 0), (0xDEADBEEF, 0x12345678, 2**32 - 100), (0, 0xFFFFFFFF, 2**64 - 500)]
    cases = [Case(element, *KINDS[k], (4, 35), rng=rng) for k, rng in itertools.product((0, 2, 6), seeds)]
    check(x, cases)


def test_stochastic_rounding_of_almost_nothing() -> None:
    """Counter 5297128 under key (0, 0) draws the uniform number 0: what is above 0 rounds up, a subnormal is 0."""
    assert model.threefry(0, 0, np.array([5297128], np.uint64))[0] < 256
    for element in ELEMENTS:
        for x, code in ((2.0**-96, 1), (2.0**-97, 0), (-(2.0**-96), 1), (0.0, 0)):
            scale = np.full((1, 1, 1), 2.0**30, F32)
            case = Case(element, ScaleKind.F32, block=(1, 2), given=scale, rng=(0, 0, 5297128))
            values = np.array([[[x, 0.0]]], F32)
            assert model.quantize(values, case)[0].flat[0] & 7 == code
            check(values, [case])


def test_stochastic_shards_round_as_the_whole() -> None:
    x = jnp.asarray(np.random.default_rng(7).standard_normal((1, 8, 256)), jnp.bfloat16)
    for tier in TIERS:
        whole = config(Case(Element.E4M3, *KINDS[0], (1, 128), rng=(3, 4, 0)), tier)
        parts = [
            _ffi.quantize(part, None, None, jnp.asarray([3, 4, i * 4 * 256, 0], jnp.uint32), config=whole)[0]
            for i, part in enumerate((x[:, :4], x[:, 4:]))
        ]
        codes, _ = _ffi.quantize(x, None, None, jnp.asarray([3, 4, 0, 0], jnp.uint32), config=whole)
        np.testing.assert_array_equal(
            np.asarray(codes).view(np.uint8), np.concatenate([np.asarray(p) for p in parts], 1).view(np.uint8)
        )


@pytest.mark.parametrize(
    ("shape", "block"),
    [((2, 700, 1002), (700, 1000)), ((1, 2, 300_002), (1, 300_000)), ((2, 700, 1002), (257, 1100))],
    ids=str,
)
def test_blocks_too_large_for_one_task(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    x = adversarial(shape, block, DTYPES["bf16"], seed=8)
    check(x, [Case(e, *KINDS[0], block) for e in ELEMENTS])
    check(x, [Case(Element.E2M1, *KINDS[2], block, rng=(8, 9, 10))], TIERS[-1:])


def test_the_peak_of_a_large_block_lies_anywhere() -> None:
    """One maximum per matrix, at the borders of the pieces that tasks take of a block, in columns and in rows."""
    places = [0, 32767, 32768, 65535, 65536, 131071, 200_000, 262_143, 262_144, 299_999]
    for rows, columns in ((1, 300_000), (3000, 100)):
        x = np.full((len(places), 300_000), 0.25, DTYPES["bf16"])
        x[np.arange(len(places)), places] = np.arange(3, 3 + len(places))
        check(x.reshape(-1, rows, columns), [Case(Element.E4M3, *KINDS[0], (rows, columns))])


@pytest.mark.parametrize("block", [(1, 128), (256, 4096)], ids=str)
def test_repeated_calls_are_equal(block: tuple[int, int]) -> None:
    x = jnp.asarray(adversarial((1, 256, 4096), block, DTYPES["bf16"]))
    settings = config(Case(Element.E4M3, *KINDS[0], block), TIERS[-1])
    call = jax.jit(lambda x: _ffi.quantize(x, None, None, None, config=settings))
    first = jax.tree.map(np.asarray, call(x))
    for _ in range(10):
        for a, b in zip(first, call(x), strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)], ids=str)
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    codes, scale = _ffi.quantize(
        jnp.zeros(shape), None, None, None, config=config(Case(Element.E4M3, *KINDS[0], (1, 4)), TIERS[0])
    )
    assert codes.shape == shape
    assert scale.size == 0


ROUNDINGS = {"f32": ["none", "pow2"], "e8m0": ["rceil", "floor", "ceil", "even"], "e4m3": ["none"]}


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_equals_the_xla_implementation(name: str) -> None:
    fmt = formats.FORMATS[name]
    x = adversarial((2, 131, 200), (1, 16), DTYPES["bf16"], seed=9)
    x[0, 0, 0], x[1, 3, 100], x[1, 130, 199] = np.nan, np.inf, -np.inf
    calls: list[dict[str, Any]] = [{"scale_rounding": rounding} for rounding in ROUNDINGS[fmt.scale.name]]
    calls.append({"rounding": "stochastic", "key": jax.random.key(3)})
    for options in calls:
        want = jax.tree.leaves(jlb.quantize(jnp.asarray(x), fmt, implementation="xla", **options))
        for tier in TIERS:
            with _ffi.force_tier(tier):
                got = jax.tree.leaves(jlb.quantize(jnp.asarray(x), fmt, implementation="native", **options))
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(
                    np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8), err_msg=f"{tier.name} {options}"
                )
