"""Faults put in on purpose, one at a time, and the test that notices each.

``python tests/mutations.py [--only NAME ...] [--json FILE]`` copies the tracked files to a temporary folder, builds the
CPU library there, runs the tests that the mutants name on the unchanged copy, and then, for each mutant of mutants.py,
replaces one piece of text, builds again if it lies in ffi/, and runs that mutant's tests up to the first that fails.

Exits with 1 if a test is red without a fault, if a mutant stays green, or if a mutant stops the tests from running at
all. A text to be replaced that is not in the tree exactly once ends it before anything runs, so the list cannot rot.
Needs git, cmake, ninja and a C++ compiler; takes some minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libjaxlowbit_cpu.so"

# pytest in a process that imports the copy: an editable install would put the original before it.
PYTEST = """
import importlib.util, sys
root = sys.argv[1]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, root)
origin = importlib.util.find_spec("jaxlowbit").origin
assert origin.startswith(root), f"imports {origin}, not the copy in {root}"
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one mutant; ``test`` is the first red one, None if all stayed green."""

    name: str
    fault: str
    file: str
    test: str | None
    seconds: float


class MutationError(Exception):
    """Something that says nothing about the mutants: tests that do not run, a build that fails."""


def tracked() -> list[str]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in names.split("\0") if name and (ROOT / name).is_file()]


def commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=12", "HEAD") + (" and uncommitted changes" if changed else "")


def check_texts(mutants: list[Mutant]) -> None:
    names = [mutant.name for mutant in mutants]
    problems = [f"{name}: two mutants of this name" for name in {n for n in names if names.count(n) > 1}]
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.old) if path.is_file() else 0
        if count != 1:
            problems.append(f"{mutant.name}: {mutant.file} holds its text {count} times, not once")
    if problems:
        raise MutationError("\n".join(problems))


class Copy:
    """The tracked files in a folder of their own, with a library built from them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.build = folder / "tree", folder / "build"
        self.clean_build = folder / "clean"
        for name in tracked():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)
        # -O1: half of the compile time, and the tests ask for values, not for speed.
        options = ["-DJAXLOWBIT_CUDA=off", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1"]
        self.run(
            [
                "cmake",
                "-S",
                self.root,
                "-B",
                self.build,
                "-G",
                "Ninja",
                *options,
                f"-DPython_EXECUTABLE={sys.executable}",
            ]
        )
        self.make()
        shutil.copytree(self.build, self.clean_build)

    def run(self, command: list[str | Path]) -> None:
        # cmake and ninja come as wheels too: then they stand next to this Python.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path}, check=False)
        if done.returncode:
            raise MutationError(f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")

    def make(self) -> None:
        self.run(["ninja", "-C", self.build])
        shutil.copy2(self.build / LIBRARY, self.root / "jaxlowbit" / LIBRARY)

    def test(self, tests: list[str]) -> str | None:
        """Runs tests up to the first red one and returns its name."""
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-rf", "--no-header"]
        command = [sys.executable, "-B", "-c", PYTEST, str(self.root), *options, *tests]
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, env=environment, check=False)
        red = re.search(r"^FAILED (\S+::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        if done.returncode == 1 and red:
            return red[1]
        if done.returncode == 0 and re.search(r"\b\d+ passed", done.stdout):
            return None
        raise MutationError(
            f"pytest {' '.join(tests)}: exit status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )

    def first_red(self, mutant: Mutant) -> str | None:
        path, native = self.root / mutant.file, mutant.file.startswith("ffi/")
        original, times = path.read_text(), path.stat()
        try:
            path.write_text(original.replace(mutant.old, mutant.new))
            if native:
                self.make()
            return self.test(list(mutant.tests))
        finally:
            path.write_text(original)
            if native:
                # The clean objects again, older than no source: the next mutant compiles what it touches and no more.
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
                shutil.rmtree(self.build)
                shutil.copytree(self.clean_build, self.build)
                shutil.copy2(self.build / LIBRARY, self.root / "jaxlowbit" / LIBRARY)


def run(mutants: list[Mutant]) -> list[Result]:
    check_texts(mutants)
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        start = time.monotonic()
        copy = Copy(Path(folder).resolve())
        print(f"library built in {time.monotonic() - start:.0f} s", flush=True)
        start = time.monotonic()
        red = copy.test(list(dict.fromkeys(test for mutant in mutants for test in mutant.tests)))
        if red is not None:
            raise MutationError(f"{red} is red without a fault")
        print(f"all tests green without a fault, {time.monotonic() - start:.0f} s", flush=True)
        for mutant in mutants:
            start = time.monotonic()
            test = copy.first_red(mutant)
            results.append(Result(mutant.name, mutant.fault, mutant.file, test, round(time.monotonic() - start, 1)))
            print(f"{mutant.name}: {test or 'STAYS GREEN'} ({results[-1].seconds} s)", flush=True)
    return results


def table(results: list[Result]) -> str:
    lines = ["| mutant | what it breaks | file | test that went red |", "|---|---|---|---|"]
    for r in results:
        lines.append(f"| {r.name} | {r.fault} | `{r.file}` | {f'`{r.test}`' if r.test else '**none**'} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[m.name for m in MUTANTS], help="these mutants")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.only or m.name in args.only]
    revision = commit()
    try:
        results = run(chosen)
    except MutationError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(results))
    if args.json:
        mutants = [dataclasses.asdict(r) for r in results]
        args.json.write_text(json.dumps({"commit": revision, "mutants": mutants}, indent=1) + "\n")
    green = [r.name for r in results if r.test is None]
    if green:
        print(f"no test notices: {', '.join(green)}", file=sys.stderr)
    return 1 if green else 0


if __name__ == "__main__":
    sys.exit(main())
