#!/usr/bin/env bash
# Runs the tests on the files and the library that Bazel laid out, with the interpreter named in the first argument.
# Further arguments are pytest's: bazel test //... --test_arg=tests/ffi
set -euo pipefail
here=$PWD
python=$1
[ -e "$python" ] || python=../${1#external/}  # the other of the two layouts of a test's files
shift

export PYTHONDONTWRITEBYTECODE=1
export HOME=${HOME:-$TEST_TMPDIR}
export PYTHONPATH=$here/bazel/site:$here  # bazel/site first takes back an editable install's hold on the name

"$python" - "$here" <<'PY'
import sys
from jaxlowbit import _ffi
library = _ffi.status().cpu
assert library.loaded, library.reason
assert library.path.startswith(sys.argv[1]), f"{library.path} is not the library that Bazel built"
print("testing", library.path)
PY
[ $# -gt 0 ] || set -- tests --ignore=tests/test_build.py  # that one tests the other build
exec "$python" -m pytest -q -n 2 -m "not gpu" -p no:cacheprovider "$@"
