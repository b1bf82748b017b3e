"""The native libraries: what loads, what is refused and why, and that JAX works all the same."""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

from jaxlowbit import _ffi, _libraries
from jaxlowbit._version import __version__

ROOT = Path(__file__).parent.parent

needs_cpu_library = pytest.mark.skipif(not _ffi.status().cpu.loaded, reason=_ffi.status().cpu.reason)


def compiler() -> str:
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    pytest.skip("no C++ compiler")


def shared_library(folder: Path, source: str, *flags: str) -> Path:
    (folder / "library.cc").write_text(source)
    target = folder / "library.so"
    command = [compiler(), "-shared", "-fPIC", "-std=c++17", *flags, str(folder / "library.cc"), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def stub(
    folder: Path, *, version: str = __version__, minor: int = 0, count: int = 0, target: str = "return 0;"
) -> Path:
    """A library with our functions and no handler."""
    return shared_library(
        folder,
        f"""extern "C" {{
        int jaxlowbit_ffi_api_minor() {{ return {minor}; }}
        const char* jaxlowbit_version() {{ return "{version}"; }}
        const char* jaxlowbit_platform() {{ return "cpu"; }}
        int jaxlowbit_target_count() {{ return {count}; }}
        int jaxlowbit_target(int index, const char** name, void** handler) {{ {target} }}
        int jaxlowbit_cpu_best_tier() {{ return 1; }}
        }}""",
    )


# ---- what loads


def targets_in_source(platform: str) -> tuple[str, ...]:
    text = (ROOT / "ffi/registration.cc").read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"#define JAXLOWBIT_{platform}_TARGETS\(TARGET\)(.*)", text)
    return tuple(re.findall(r'TARGET\("(\w+)"', line))


@needs_cpu_library
def test_cpu_library_serves_the_listed_targets() -> None:
    assert _ffi.status().cpu.targets == targets_in_source("CPU")
    assert {_ffi.DOT, _ffi.QUANTIZE} <= set(_ffi.status().cpu.targets)


@pytest.mark.skipif(not _ffi.status().cuda.loaded, reason=f"CUDA library: {_ffi.status().cuda.reason}")
def test_cuda_library_loads_without_a_gpu_and_serves_the_listed_targets() -> None:
    assert _ffi.status().cuda.targets == targets_in_source("CUDA")
    assert _ffi.PROBE in _ffi.status().cuda.targets
    probe = _ffi.cuda_probe()
    assert re.fullmatch(r"\d+\.\d+", probe["runtime"])
    assert probe["devices"] or "error" in probe


@needs_cpu_library
def test_status_of_a_loaded_library() -> None:
    cpu = _ffi.status().cpu
    assert cpu.platform == "cpu"
    assert cpu.reason == ""
    assert cpu.version == __version__
    assert cpu.ffi_minor is not None
    assert cpu.runtime_ffi_minor is not None
    assert cpu.ffi_minor <= cpu.runtime_ffi_minor
    assert Path(cpu.path or "").is_file()
    assert cpu.tier == _ffi.available_tiers()[-1].name.lower()
    assert _ffi.native_available("cpu") == (True, "")


# ---- what is refused, and that JAX still works then

SCRIPT = """
import importlib.machinery, importlib.util, sys
real = importlib.util.find_spec
def find_spec(name, package=None):
    if name == "jaxlowbit.libjaxlowbit_cpu":
        return importlib.machinery.ModuleSpec(name, None, origin={path!r})
    return real(name, package)
importlib.util.find_spec = find_spec
import jax, jax.numpy as jnp
from jaxlowbit import _ffi, _libraries
{body}
"""


def run_with_library(path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Imports the package in a new process, with another file in the place of its CPU library."""
    script = SCRIPT.format(path=str(path), body=textwrap.dedent(body))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)


REFUSED = """
cpu = _ffi.status().cpu
assert not cpu.loaded and cpu.targets == () and cpu.tier is None, cpu
assert _ffi.available_tiers() == ()
assert jax.jit(lambda x: x @ x)(jnp.eye(3)).sum() == 3
import jaxlowbit
w = jnp.ones((4, 8), jnp.float8_e4m3fn)
y = jaxlowbit.fp8_dot(jnp.ones((2, 8)), w, jnp.float32(0.5), act=None, implementation="xla")
assert (y == 4).all(), y
try:
    jaxlowbit.fp8_dot(jnp.ones((2, 8)), w, jnp.float32(0.5), act=None, implementation="native")
except Exception as error:
    assert cpu.reason in str(error), error
else:
    raise AssertionError("native without a library")
print(cpu.reason)
print(jaxlowbit.info())
"""


@pytest.fixture(scope="module")
def too_new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real library of ours, built with headers that claim a later FFI version than any runtime has."""
    folder = tmp_path_factory.mktemp("too_new")
    headers = folder / "include/xla/ffi/api"
    shutil.copytree(Path(jax.ffi.include_dir()) / "xla/ffi/api", headers)
    c_api = (headers / "c_api.h").read_text()
    c_api = re.sub(r"(#define XLA_FFI_API_MINOR) \d+", r"\1 99", c_api)
    (headers / "c_api.h").write_text(c_api)
    (folder / "jaxlowbit_version.h").write_text(f'#define JAXLOWBIT_VERSION "{__version__}"\n')
    source = f"""
    #include "{ROOT}/ffi/registration.cc"
    #include "xla/ffi/api/ffi.h"
    static xla::ffi::Error Nothing() {{ return xla::ffi::Error::Success(); }}
    XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitDotCpu, Nothing, xla::ffi::Ffi::Bind());
    XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitQuantizeCpu, Nothing, xla::ffi::Ffi::Bind());
    JAXLOWBIT_EXPORT int jaxlowbit_cpu_best_tier() {{ return 1; }}
    """
    return shared_library(
        folder, source, "-w", f"-I{ROOT}", f"-I{folder}", f"-I{folder}/include", "-DJAXLOWBIT_PLATFORM_CPU"
    )


def test_library_of_a_newer_ffi_is_refused_and_jax_works(too_new: Path) -> None:
    result = run_with_library(too_new, REFUSED)
    assert result.returncode == 0, result.stderr
    jaxlib, runtime = importlib.metadata.version("jaxlib"), _ffi.status().cpu.runtime_ffi_minor
    assert f"built against XLA FFI 0.99, but jaxlib {jaxlib} speaks 0.{runtime}" in result.stdout


def test_that_library_would_stop_the_backend(too_new: Path) -> None:
    """What the guard prevents: without it, the test above could not fail."""
    body = f"""
    import ctypes
    name, handler = next(iter(_libraries._read_targets(ctypes.CDLL({str(too_new)!r})).items()))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.c_void_p(handler)), platform="cpu")
    jnp.zeros(3)
    """
    result = run_with_library(too_new, body)
    assert result.returncode != 0
    assert "Unable to initialize backend" in result.stderr


def test_corrupt_library_is_refused_and_jax_works(tmp_path: Path) -> None:
    path = tmp_path / "libjaxlowbit_cpu.so"
    path.write_bytes(b"\x7fELF and nothing else")
    result = run_with_library(path, REFUSED)
    assert result.returncode == 0, result.stderr
    assert "does not load: " in result.stdout
    assert str(path) in result.stdout


def test_missing_library_says_so() -> None:
    found, library = _libraries._load("cpu", None)
    assert library is None
    assert found.path is None
    assert not found.loaded
    assert "not built: no libjaxlowbit_cpu.so" in found.reason


def test_library_of_somebody_else_is_refused(tmp_path: Path) -> None:
    found, library = _libraries._load("cpu", shared_library(tmp_path, "int another;"))
    assert library is None
    assert "does not load: " in found.reason
    assert "jaxlowbit_ffi_api_minor" in found.reason


def test_library_of_another_version_is_refused(tmp_path: Path) -> None:
    found, library = _libraries._load("cpu", stub(tmp_path, version="0.0.1"))
    assert library is None
    assert found.version == "0.0.1"
    assert f"built from jaxlowbit 0.0.1, but this is {__version__}" in found.reason


def test_unknown_runtime_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path / "nowhere"))
    found, library = _libraries._load("cpu", stub(tmp_path))
    assert library is None
    assert found.runtime_ffi_minor is None
    assert "FFI version is unknown" in found.reason


def test_header_without_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("// empty")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert _libraries._runtime_ffi_minor() is None


def test_library_without_targets_loads(tmp_path: Path) -> None:
    """The stubs above are refused for their one fault alone: without it they load."""
    found, library = _libraries._load("cpu", stub(tmp_path))
    assert found.loaded, found.reason
    assert found.tier == "portable"
    assert library is not None


@pytest.mark.parametrize(
    ("target", "message"),
    [("return 0;", "lists no target 0"), ("*name = 0; *handler = 0; return 1;", "no name or no handler")],
)
def test_faulty_target_list_raises(tmp_path: Path, target: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _libraries._load("cpu", stub(tmp_path, count=1, target=target))


def test_native_available_gives_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _ffi.native_available("tpu") == (False, "jaxlowbit has no native kernels for platform 'tpu'")
    missing = _libraries._load("cuda", None)[0]
    monkeypatch.setattr(_libraries, "_CUDA_STATUS", missing)
    available, reason = _ffi.native_available("gpu")
    assert not available
    assert reason.startswith("the cuda library is not loaded (not built: ")


@needs_cpu_library
def test_native_available_asks_for_the_target() -> None:
    assert _ffi.native_available("cpu", "jaxlowbit_dot_v0") == (
        False, "the cpu library has no kernel jaxlowbit_dot_v0"
    )  # fmt: skip


def test_library_path_outside_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a source folder the library is found in the installed distribution; without one there is none."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _libraries._library_path("libjaxlowbit_none") is None

    def not_found(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_found)
    assert _libraries._library_path("libjaxlowbit_cpu") is None


def test_probe_without_the_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libraries, "_CUDA_LIBRARY", None)
    assert _ffi.cuda_probe() == {"error": _ffi.status().cuda.reason, "devices": []}


def test_probe_longer_than_its_buffer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Long:
        @staticmethod
        def jaxlowbit_cuda_probe(buffer: ctypes.Array[ctypes.c_char], capacity: int) -> int:
            return capacity

    monkeypatch.setattr(_libraries, "_CUDA_LIBRARY", Long)
    with pytest.raises(RuntimeError, match="CUDA probe needs 65536 bytes"):
        _ffi.cuda_probe()
