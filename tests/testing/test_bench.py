"""The benchmarks run, check what they time, and say where a number comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxlowbit as jlb
from jaxlowbit import _ffi
from jaxlowbit.testing.bench import main, peers, timing

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="benchmarks of this version are for the CPU")


def test_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "dense.json"
    argv = ["dense", "--quick", "--shapes", "128x256", "--m", "1", "--seconds", "0.01", "--json", str(target)]
    argv += ["--formats", "FP8_128X128", "FP8_CHANNEL", "NVFP4", "MXFP4"]
    assert main(argv) == 0
    out, progress = capsys.readouterr()
    assert "dense 1x128x256" in progress
    assert "M=1 128x256: NVFP4 is" in out
    document = json.loads(target.read_text())
    environment = document["environment"]
    assert document["schema"] == "jaxlowbit-bench/1"
    assert environment["command"].startswith("python -m jaxlowbit bench dense --quick")
    assert environment["versions"]["jaxlowbit"] == jlb.__version__
    for key in ("cpu", "cpus", "date", "tier", "commit"):
        assert key in environment
    results = document["results"]
    rows = {(r["m"], r["format"], r["act"]) for r in results}
    acts = {("FP8_128X128", None), ("FP8_128X128", "dynamic"), ("FP8_CHANNEL", None), ("FP8_CHANNEL", "dynamic")}
    acts |= {("NVFP4", None), ("MXFP4", None), ("MXFP4", "dynamic")}
    assert rows == {(1, *act) for act in acts}
    for r in results:
        assert min(r["ours_median_s"], r["peer_median_s"], r["bf16_dot_median_s"], r["f32_dot_median_s"]) > 0
        assert r["peer_median_s"] == min(timed["median_s"] for timed in r["peers"].values())
        assert r["ours_min_s"] <= r["ours_median_s"]
        assert r["speedup_over_peer"] == pytest.approx(r["peer_median_s"] / r["ours_median_s"])
        assert len(r["peers"]) >= 5


def test_quantize(tmp_path: Path) -> None:
    target = tmp_path / "quantize.json"
    argv = ["quantize", "--quick", "--shapes", "24x256", "--formats", "FP8_1X128", "MXFP4", "--seconds", "0.01"]
    assert main([*argv, "--json", str(target)]) == 0
    results = json.loads(target.read_text())["results"]
    assert [r["format"] for r in results] == ["FP8_1X128", "MXFP4"]
    assert results[0]["bytes"] == 24 * 256 * 3 + 24 * 2 * 4


@pytest.mark.parametrize("fault", ["ours", "peer"])
def test_a_wrong_number_is_never_timed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "ours":
        right = jlb.fp8_dot
        monkeypatch.setattr(jlb, "fp8_dot", lambda *args, **keywords: right(*args, **keywords) * jnp.bfloat16(1.01))
    else:
        wrong = jnp.ones((2, 128), jnp.bfloat16)
        monkeypatch.setattr(peers, "_on_partial_sums", lambda *_: wrong)
    with pytest.raises(AssertionError, match="outside the bound"):
        main(["dense", "--quick", "--shapes", "128x256", "--m", "2", "--formats", "FP8_128X128", "--seconds", "0.01"])


def test_a_forced_tier_is_taken_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    if not _ffi.available_tiers():
        pytest.skip(_ffi.status().cpu.reason)
    argv = ["dense", "--quick", "--shapes", "64x128", "--m", "1", "--formats", "FP8_CHANNEL", "--seconds", "0.01"]
    assert main([*argv, "--tier", "portable"]) == 0
    out = capsys.readouterr().out
    assert "tier portable, forced" in out
    assert "portable" in out.split("---", 1)[1]
    assert _ffi.current_tier() is _ffi.Tier.AUTO


def test_a_tier_that_is_not_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "available_tiers", lambda: (_ffi.Tier.PORTABLE,))
    assert main(["dense", "--tier", "amx"]) == 1
    assert "does not run tier amx; it runs: portable" in capsys.readouterr().out


def test_a_platform_without_benchmarks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert main(["quantize"]) == 1
    assert "no benchmark for platform 'tpu'" in capsys.readouterr().out


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["sparse"], ["dense", "--shapes", "wide"]):
        with pytest.raises(SystemExit):
            main(argv)
    assert "NxK" in capsys.readouterr().err


def test_interleaving_spends_its_time_on_what_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"ours": 1.0, "fast": 2.0, "near": 2.8, "slow": 7.0, "other": 50.0}
    monkeypatch.setattr(timing, "once", lambda call: call())

    def candidate(name: str, kind: str, group: str) -> timing.Candidate:
        return timing.Candidate(name, lambda: seconds[name], group, kind)

    kinds = {"ours": ("ours", "a"), "fast": ("peer", "a"), "near": ("peer", "a")}
    kinds |= {"slow": ("peer", "a"), "other": ("peer", "b")}
    candidates: list[Any] = [candidate(name, *kind) for name, kind in kinds.items()]
    timing.interleave(candidates, seconds=0.0, min_rounds=7, max_rounds=9, label="test")
    rounds = {c.name: len(c.seconds) for c in candidates}
    assert rounds == {"ours": 7, "fast": 7, "near": 5, "slow": 2, "other": 7}
    assert candidates[1].median == candidates[1].fastest == 2.0


@pytest.mark.parametrize("fmt", [jlb.FP8_128X128, jlb.FP8_CHANNEL, jlb.MXFP4, jlb.NVFP4], ids=repr)
def test_peers_cover_several_ways(fmt: jlb.Format) -> None:
    """At the default sizes: at least four expressions, among them bfloat16 and float32 weights and a table."""
    names = [peer.name for peer in peers.peers(fmt, 1, 4096, 4096)]
    assert len(names) == len(set(names)) >= 4
    for part in ("bfloat16", "float32", "table", "bits", "convert"):
        assert any(part in name for name in names)
