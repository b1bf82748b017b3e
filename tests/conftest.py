"""Test settings: strict JAX, eight CPU devices for the sharding tests, and a reason for every GPU test left
out."""

from __future__ import annotations

import os

# Read once, when JAX starts its CPU backend: it has to stand before the first import of jax.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Silent broadcasting over ranks and silent dtype promotion are how a (N,) scale meets a (N, 1) one unnoticed.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_x64", False)

# Deterministic examples: a red run can be repeated, and a slow machine is no failure.
hypothesis.settings.register_profile(
    "jaxlowbit",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("jaxlowbit")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU that JAX sees; skipped with the reason elsewhere")


def _gpu_missing() -> str | None:
    """Why tests marked ``gpu`` cannot run here, or None where they can."""
    try:
        devices = jax.devices("gpu")
    except RuntimeError as error:
        return f"no GPU: {str(error).splitlines()[0]}"
    return None if devices else "no GPU: jax.devices('gpu') is empty"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _gpu_missing() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
