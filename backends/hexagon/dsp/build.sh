#!/bin/sh
# Build the NPU's library and the phone's worker with the vendor's SDK (not run here: it needs an
# account of the vendor's).
#
#   python -m pi2.backends.hexagon.kernels.program MODULE SPEC.json graphs.o
#   HEXAGON_SDK_ROOT=... HEXAGON_TOOLS_ROOT=... ANDROID_NDK=... ./build.sh graphs.o v75 OUT
set -eu
graphs=$(realpath "$1") version=$2 out=$3
here=$(dirname "$(realpath "$0")")
: "${HEXAGON_SDK_ROOT:?the vendor's SDK}" "${HEXAGON_TOOLS_ROOT:?its compiler}" "${ANDROID_NDK:?}"
includes="-I$here -I$HEXAGON_SDK_ROOT/incs -I$HEXAGON_SDK_ROOT/incs/stddef"
mkdir -p "$out" && cd "$out"

# The interface: pi2_npu.h, pi2_npu_stub.c for the phone and pi2_npu_skel.c for the NPU.
qaic="$HEXAGON_SDK_ROOT/ipc/fastrpc/qaic/Ubuntu/qaic"
"$qaic" -mdll -I "$HEXAGON_SDK_ROOT/incs" -I "$HEXAGON_SDK_ROOT/incs/stddef" "$here/pi2_npu.idl"

# shellcheck disable=SC2086
"$HEXAGON_TOOLS_ROOT/Tools/bin/hexagon-clang" "-m$version" -mhvx -mhvx-length=128B -O2 -fPIC \
    -shared $includes -I. "-I$HEXAGON_SDK_ROOT/rtos/qurt/compute$version/include/qurt" \
    -o libpi2_npu_skel.so "$here/skel.c" pi2_npu_skel.c "$graphs"

# shellcheck disable=SC2086
"$ANDROID_NDK/toolchains/llvm/prebuilt/linux-x86_64/bin/aarch64-linux-android28-clang" -O2 \
    $includes -I. -o pi2-npu-host "$here/host.c" pi2_npu_stub.c \
    "-L$HEXAGON_SDK_ROOT/ipc/fastrpc/remote/ship/android_aarch64" -lcdsprpc
echo "copy $out/libpi2_npu_skel.so and $out/pi2-npu-host to the phone: docs/experimental/gpu-npu-phone.md"
