"""What ``jaxlowbit.info`` and ``python -m jaxlowbit`` report."""

import importlib
import json
import platform
import types

import jax
import pytest

import jaxlowbit
from jaxlowbit import _ffi, _info
from jaxlowbit.__main__ import main


def test_info_names_versions_and_libraries() -> None:
    found = jaxlowbit.info()
    text = str(found)
    assert text.startswith(f"jaxlowbit {jaxlowbit.__version__}\n")
    for line in (f"jax          {jax.__version__}", f"python       {platform.python_version()}"):
        assert line in text
    for library in (found.cpu, found.cuda):
        assert f"{library.platform.upper()} library" in text
        if library.loaded:
            assert f"built against 0.{library.ffi_minor}, jaxlib speaks 0.{library.runtime_ffi_minor}" in text
            assert all(target in text for target in library.targets)
        else:
            assert f"not loaded: {library.reason}" in text


def test_info_names_the_tiers() -> None:
    found = jaxlowbit.info()
    assert found.tiers == tuple(tier.name.lower() for tier in _ffi.available_tiers())
    if found.tiers:
        assert f"kernel tier  {found.cpu.tier} (this machine runs {', '.join(found.tiers)})" in str(found)


def report(gpu: dict[str, object]) -> str:
    return "\n".join(_info._gpu_lines(gpu))


HOPPER = {"name": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "memory_bytes": 140 * 2**30}


def test_gpu_lines() -> None:
    text = report({"driver": "13.0", "runtime": "13.0", "devices": [HOPPER]})
    assert "driver 13.0, runtime 13.0" in text
    assert text.endswith("NVIDIA H200, compute capability 9.0, 140 GiB")


def test_a_gpu_without_kernels_is_named() -> None:
    text = report({"driver": "13.0", "runtime": "13.0", "devices": [{**HOPPER, "capability": "8.0"}]})
    assert text.endswith("(no native kernels: they need 9.0)")


def test_a_failed_probe_is_reported() -> None:
    assert report({"error": "not built", "devices": []}) == "  devices      none (not built)"
    text = report({"driver": None, "runtime": "13.0", "devices": [HOPPER], "error": "out of memory"})
    assert "driver not found" in text
    assert text.endswith("error        out of memory")
    assert report({"devices": []}).endswith("none")


def test_command_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert capsys.readouterr().out == f"{jaxlowbit.info()}\n"


def test_command_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["versions"]["jaxlowbit"] == jaxlowbit.__version__
    assert printed["cpu"]["loaded"] == _ffi.status().cpu.loaded
    assert set(printed) == {"versions", "machine", "cpu", "cuda", "tiers", "gpu"}


@pytest.mark.parametrize("argv", [[], ["convert"], ["info", "more"], ["info", "--jsn"]])
def test_wrong_command_lines_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "usage: python -m jaxlowbit" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "module"), [("demo", "jaxlowbit.demo"), ("bench", "jaxlowbit.testing.bench")])
def test_commands_of_their_own_get_the_rest(command: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    fake = types.SimpleNamespace(main=lambda argv: calls.append(list(argv)) or 7)

    def import_module(name: str) -> object:
        assert name == module
        return fake

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert main([command, "dense", "--json", "out.json", "-h"]) == 7
    assert calls == [["dense", "--json", "out.json", "-h"]]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def import_module(name: str) -> object:
        raise ModuleNotFoundError("No module named 'gguf.reader'", name="gguf.reader")

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == (
        "jaxlowbit demo: needs the package 'gguf.reader': pip install 'jaxlowbit[demo]'\n"
    )


def test_a_fault_of_our_own_is_not_taken_for_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> object:
        raise ModuleNotFoundError("No module named 'jaxlowbit.gone'", name="jaxlowbit.gone")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="gone"):
        main(["bench"])
