#!/usr/bin/env bash
# The CPU library on 64-bit Arm: cross-compiles it as CMake would there, then runs its portable kernels in an emulator.
# Installs Debian's cross compiler and emulator where they are missing.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
out=_build/aarch64

if ! command -v aarch64-linux-gnu-g++ >/dev/null || ! command -v qemu-aarch64-static >/dev/null; then
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user-static
fi

include=$("$python" -c "from importlib.util import find_spec; print(find_spec('jaxlib').submodule_search_locations[0])")/include
cmake=$(dirname "$python")/cmake
[ -x "$cmake" ] || cmake=cmake
"$cmake" -S . -B "$out" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DJAXLOWBIT_CUDA=off -DJAXLOWBIT_WERROR=ON \
  -DJAXLOWBIT_XLA_INCLUDE_DIR="$include" >"$out.log" || { cat "$out.log"; exit 1; }
"$cmake" --build "$out" -j2
file "$out/libjaxlowbit_cpu.so" | grep -q aarch64 || { echo "not a library for aarch64"; exit 1; }

# Everything but the handlers, which need XLA to call them.
sources=$(ls ffi/cpu/*.cc | grep -vE '/(dot|quantize)\.cc$')
for target in native aarch64; do
  [ $target = native ] && { compiler=${CXX:-g++} run=; } || { compiler=aarch64-linux-gnu-g++ run=qemu-aarch64-static; }
  # shellcheck disable=SC2086
  "$compiler" -std=c++17 -O2 -static -pthread -I. -Itests tests/aarch64/driver.cc tests/ffi/dot_entry.cc \
    tests/ffi/quantize_harness.cc $sources -o "$out/driver-$target"
  echo "== $target"
  $run "$out/driver-$target" | tail -3
done
