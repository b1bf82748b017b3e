"""The rules of the house: small files, imports that go down only, one stem an op, one knower of each thing."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxlowbit"
MAX_LINES = 400

# From the bottom to the top: a module may import what stands on an earlier line or in its own entry.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version",),
    ("errors", "formats"),
    ("_libraries",),
    ("_ffi",),
    ("_dispatch", "_info", "_bits"),
    ("_e8m0", "_stochastic"),
    ("codecs",),
    ("scaled_array",),
    ("sharding",),
    ("_quantize_xla", "_quantize_args"),
    ("_quantize_native",),
    ("quantize",),
    ("ops",),
    ("autodiff",),
    ("nn", "checkpoints"),
    ("",),  # jaxlowbit/__init__.py, the facade
    ("testing", "demo"),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Who may import the way to the native kernels, and who the libraries below it.
FFI_USERS = {"quantize", "_quantize_native", "ops", "_dispatch", "_info"}


def tracked(*patterns: str) -> list[Path]:
    """Files of the tree that match, from git where there is one (a source archive has none)."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def layer_of(path: Path) -> str:
    """``ops`` for jaxlowbit/ops/dot.py, ``codecs`` for jaxlowbit/codecs.py, empty for the facade."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported_layers(tree: ast.AST) -> set[str]:
    """The layers of jaxlowbit that a module's imports name, at the top or inside a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "jaxlowbit":
                found.add(parts[1] if len(parts) > 1 and parts[1] in LEVEL else "")
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))
module_test = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 10
    assert {layer_of(path) for path in MODULES} <= set(LEVEL)


@module_test
def test_imports_go_down_only(path: Path) -> None:
    layer = layer_of(path)
    too_high = [name for name in imported_layers(ast.parse(path.read_text())) if LEVEL[name] > LEVEL[layer]]
    assert not too_high, f"{path.relative_to(ROOT)} ({layer or 'facade'}) imports {too_high}, which stand above it"


@module_test
def test_one_way_to_the_native_kernels(path: Path) -> None:
    layer, imports = layer_of(path), imported_layers(ast.parse(path.read_text()))
    if "_ffi" in imports:
        assert layer in FFI_USERS | {"testing"}, f"{path.relative_to(ROOT)} imports _ffi"
    if "_libraries" in imports:
        assert layer == "_ffi", f"{path.relative_to(ROOT)} imports _libraries: take it from _ffi"


@module_test
def test_calls_and_gradients_have_one_place(path: Path) -> None:
    """Custom calls in _ffi alone, their registration in _libraries, custom gradients in autodiff."""
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    layer = layer_of(path)
    assert "ffi_call" not in names or layer == "_ffi"
    assert "register_ffi_target" not in names or layer == "_libraries"
    assert "custom_vjp" not in names or layer in {"autodiff", "quantize"}


@module_test
def test_no_environment_variables(path: Path) -> None:
    """Nothing the package does hangs on one; the demo and the benchmarks take options."""
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & {"environ", "getenv", "environb"}, f"{path.relative_to(ROOT)} reads the environment"


def test_native_code_reads_no_environment() -> None:
    for path in tracked("ffi"):
        assert not re.search(r"\b(secure_)?getenv\b", path.read_text()), path


def test_files_are_short() -> None:
    suffixes = ("*.py", "*.cc", "*.h", "*.cu", "*.cuh", "*.bzl", "*.sh")
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in tracked(*suffixes)}
    assert len(lengths) > 20
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_no_machine_paths() -> None:
    """Paths of one machine, in whatever file: they would be wrong on the next."""
    pattern = re.compile(r"(^|[^\w./])/(home|root|work|opt|mnt|tmp|Users)/\w", re.MULTILINE)
    found = {}
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a picture
        if path != Path(__file__) and (match := pattern.search(text)):
            found[str(path.relative_to(ROOT))] = match.group(0)
    assert not found


# ---- native code


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^">]+)[">]', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "path", [*ROOT.glob("ffi/cuda/device/*"), *ROOT.glob("ffi/cuda/*.cu")], ids=lambda path: path.name
)
def test_device_code_knows_no_xla(path: Path) -> None:
    """Kernels compile without the FFI headers, which cost seconds a file in nvcc."""
    assert not [name for name in includes(path) if name.startswith("xla/") or name == "ffi/common/check.h"]


@pytest.mark.parametrize("path", [*ROOT.glob("ffi/cuda/*.cc")], ids=lambda path: path.name)
def test_handlers_know_no_instructions(path: Path) -> None:
    assert not re.search(r"\basm\b", path.read_text())
    assert not [name for name in includes(path) if name.startswith("ffi/cuda/device/")]


def test_common_code_knows_no_platform() -> None:
    for path in ROOT.glob("ffi/common/*"):
        assert not [name for name in includes(path) if "cuda" in name or "ffi/cpu" in name or "intrin" in name], path


# ---- one stem an op


def ops() -> set[str]:
    """Names of the ops from the list of targets: ``dot`` of ``jaxlowbit_dot_v1``."""
    return set(re.findall(r'"jaxlowbit_(\w+)_v\d+"', (ROOT / "ffi/registration.cc").read_text())) - {"probe"}


def test_one_stem_an_op() -> None:
    """An op has the same stem in the package, in ffi/ and in tests/."""
    assert {"dot", "quantize"} <= ops()
    for op in ops():
        stems = [f"jaxlowbit/ops/{op}.py", f"jaxlowbit/{op}.py"]
        assert any((ROOT / stem).is_file() for stem in stems), f"{op}: none of {stems}"
        for platform in ("cpu", "cuda"):
            named = f"Jaxlowbit{''.join(part.title() for part in op.split('_'))}{platform.title()}"
            if named in (ROOT / "ffi/registration.cc").read_text():
                assert (ROOT / f"ffi/{platform}/{op}.cc").is_file()
                assert (ROOT / f"tests/ffi/test_{op}_{platform}.py").is_file(), f"no test of {op} on {platform}"


# Public modules without a test file of their own, and where they are tested.
TESTED_IN = {
    "errors.py": "tests/ops/test_operands.py",  # and wherever one of its messages is raised
    "formats.py": "tests/test_scaled_array.py",
    "ops/dot.py": "tests/autodiff/test_dot.py",  # which calls it through the public functions
}


@pytest.mark.parametrize("folder", ["ops", "autodiff", "nn", "checkpoints", ""])
def test_every_public_module_has_its_test(folder: str) -> None:
    """tests/ops/test_dot.py for jaxlowbit/ops/dot.py. Modules with a leading underscore are seen through others."""
    for path in sorted((PACKAGE / folder).glob("[a-z]*.py")):
        name = str(path.relative_to(PACKAGE))
        test = ROOT / TESTED_IN.get(name, f"tests/{folder}/test_{path.name}")
        assert test.is_file(), f"{path.relative_to(ROOT)} has no {test.relative_to(ROOT)}"
