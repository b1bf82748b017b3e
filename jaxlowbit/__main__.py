"""``python -m jaxlowbit info | demo | bench``."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from jaxlowbit._info import info

# Commands that live in a module of their own: its main(argv) takes the rest of the command line and returns the exit
# status. Imported when asked for: they need packages that the library does not.
_MODULES = {
    "demo": ("jaxlowbit.demo", "train LoRA adapters on a small language model with FP8 and FP4 weights"),
    "bench": ("jaxlowbit.testing.bench", "measure the kernels against XLA"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxlowbit", description="FP8 and FP4 matrix products for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    info_parser = commands.add_parser("info", help="versions, native libraries, kernel tiers, GPUs")
    info_parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    for name, (_, text) in _MODULES.items():
        commands.add_parser(name, help=text, add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command in _MODULES:
        return _run(arguments.command, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    found = info()
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    return 0


def _run(command: str, argv: Sequence[str]) -> int:
    try:
        module = importlib.import_module(_MODULES[command][0])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "jaxlowbit":
            raise
        advice = f"pip install 'jaxlowbit[{command}]'"
        print(f"jaxlowbit {command}: needs the package {error.name!r}: {advice}", file=sys.stderr)
        return 1
    status: int = module.main(argv)
    return status


if __name__ == "__main__":
    sys.exit(main())
