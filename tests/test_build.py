"""What is built: the wheel's tag, the version in all places, a source archive that lacks nothing."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxlowbit
from jaxlowbit import _ffi

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Builds need what is in pyproject's build-system.requires, here without fetching it.
for package in ("scikit-build-core", "cmake", "ninja"):
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install 'jaxlowbit[dev]'", allow_module_level=True)


def tracked_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return {line for line in listed.stdout.splitlines() if (ROOT / line).exists()}


def backend(call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Calls the project's build backend as a front end would: in a process of its own, from the project's root."""
    code = f"import sys; sys.path.insert(0, 'build_backend'); import jaxlowbit_build as backend; print({call})"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


# ---- one version


def test_version_is_written_once() -> None:
    """The package, the installed metadata and both libraries say what _version.py says."""
    version = jaxlowbit.__version__
    assert importlib.metadata.version("jaxlowbit") == version
    for library in _ffi.status():
        assert library.version in (None, version)
    assert "version" in PROJECT["project"]["dynamic"]
    places = [
        name
        for name in tracked_files()
        if name.endswith((".py", ".toml", ".txt", ".cc", ".h", ".cu", ".bazel", "BUILD", "WORKSPACE"))
        and re.search(rf"""version\w*\s*=\s*["']{re.escape(version)}["']""", (ROOT / name).read_text(), re.IGNORECASE)
    ]
    assert places == ["jaxlowbit/_version.py"]


# ---- what may be asked of the build


def test_headers_come_from_the_oldest_supported_jaxlib() -> None:
    """Built against newer FFI headers, the library would be refused by the oldest JAX it claims to run on."""
    (jax_lower,) = re.findall(r"^jax>=([\d.]+)$", "\n".join(PROJECT["project"]["dependencies"]), re.MULTILINE)
    assert f"jaxlib=={jax_lower}.*" in PROJECT["build-system"]["requires"]


def test_cuda_asked_for_without_nvcc_is_refused(tmp_path: Path) -> None:
    result = backend("backend.get_requires_for_build_wheel()", JAXLOWBIT_CUDA="on", PATH=str(tmp_path), CUDACXX="nvcc")
    assert result.returncode != 0
    assert "JAXLOWBIT_CUDA=on, but no nvcc was found" in result.stderr


def test_another_word_for_cuda_is_refused() -> None:
    result = backend("backend.get_requires_for_build_editable()", JAXLOWBIT_CUDA="yes")
    assert result.returncode != 0
    assert "JAXLOWBIT_CUDA is 'yes': expected on, off or auto" in result.stderr


def test_requirements_without_cuda() -> None:
    result = backend("backend.get_requires_for_build_wheel()", JAXLOWBIT_CUDA="off")
    assert result.returncode == 0, result.stderr
    assert "cuda" not in result.stdout


# ---- what is built


@pytest.mark.slow
def test_wheel_serves_every_python_and_holds_the_library(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index",
            "-Ccmake.define.JAXLOWBIT_WERROR=ON", f"-Cbuild-dir={tmp_path / 'build'}", "-w", str(tmp_path), str(ROOT),
        ],
        capture_output=True, text=True, check=False, env={**os.environ, "JAXLOWBIT_CUDA": "off"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"jaxlowbit-{re.escape(jaxlowbit.__version__)}-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        library = archive.read("jaxlowbit/libjaxlowbit_cpu.so")
    assert {name for name in names if name.endswith(".so")} == {"jaxlowbit/libjaxlowbit_cpu.so"}
    assert {name for name in tracked_files() if name.startswith("jaxlowbit/")} <= names
    for word in ("ffi/", "tests/", "build_backend/"):
        assert not [name for name in names if name.startswith(word)]

    # Python calls what it exports, and it exports nothing else.
    path = tmp_path / "library.so"
    path.write_bytes(library)
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert exported
    assert all(name.startswith("jaxlowbit_") for name in exported), exported


@pytest.mark.slow
def test_source_archive_holds_every_tracked_file(tmp_path: Path) -> None:
    result = backend(f"backend.build_sdist({str(tmp_path)!r})")
    assert result.returncode == 0, result.stderr
    (archive_path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive_path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked_files() <= names
    made = {name for name in names if name.endswith((".so", ".pyc", ".o")) or name.startswith(("_build", ".venv"))}
    assert not made
