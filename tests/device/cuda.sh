#!/usr/bin/env bash
# The CUDA delegate on a real GPU: build, kernels, conformance, whole models, compute-sanitizer on a sample, times. At most ten minutes, no network.
# Needs: an NVIDIA driver, Python with torch 2.11+ (CUDA), flatbuffers, cffi, numpy; NVRTC (torch brings it, or trivet[cuda]); a C compiler.
#   tests/device/cuda.sh [FOLDER]     results go to FOLDER (default: $OUT, else build/cuda)
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-${OUT:-build/cuda}}
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
end=$((SECONDS + ${LIMIT:-570}))
failed=()

stage() { # name, most seconds, command ..
  local name=$1 most=$2 left=$((end - SECONDS)) begin=$SECONDS
  shift 2
  if ((left < 5)); then
    echo "== $name: no time left"
    failed+=("$name")
    return 1
  fi
  ((most < left)) || most=$left
  if timeout "$most" "$@" >"$out/$name.log" 2>&1; then
    echo "== $name: ok, $((SECONDS - begin)) s"
  else
    echo "== $name: FAILED (status $?), $((SECONDS - begin)) s"
    tail -n 15 "$out/$name.log"
    failed+=("$name")
    return 1
  fi
}

build() {
  if command -v cmake >/dev/null; then
    cmake -S . -B "$out/lib" -DCMAKE_BUILD_TYPE=Release && cmake --build "$out/lib" -j 8
  else # what CMakeLists.txt does, without it
    mkdir -p "$out/lib"
    cc -std=c11 -O2 -fPIC -shared -fvisibility=hidden -ffp-contract=off -fno-math-errno -DTRV_CUDA -D_GNU_SOURCE -Ihal/include -Iruntime_c/include \
      -Ischema/gen -Ihal/cuda $(ls runtime_c/src/*.c | grep -v windows | grep -v wasi) hal/cpu/*.c hal/cuda/*.c -o "$out/lib/libtrivet.so" -lm -ldl -lpthread
  fi
}
export -f build
export out PYTHONPATH="$PWD/sdk${PYTHONPATH:+:$PYTHONPATH}" TRIVET_LIBRARY="$out/lib/libtrivet.so" TRIVET_SHIM_CACHE="$out/cache"

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null | tee "$out/gpu.txt"
stage build 150 bash -c build || exit 1
check=("$python" tests/device/cuda_check.py)
stage kernels 150 "${check[@]}" kernels
stage driver 60 "${check[@]}" driver
conformance() {
  cc -std=gnu11 -O1 -DDRIVER=trv_cuda_driver -Ihal/include -Iruntime_c/include -Ischema/gen -Itests/hal tests/hal/conformance.c tests/hal/faulty.c \
    -o "$out/conformance" -L"$out/lib" -ltrivet -Wl,-rpath,"$out/lib" -lm -ldl -lpthread &&
    "$python" tests/device/cuda_check.py programs && "$out/conformance" --memory "$out"/conformance-*.trv
}
export -f conformance
export python
stage conformance 90 bash -c conformance
stage models 150 "${check[@]}" models
if command -v compute-sanitizer >/dev/null; then
  stage memcheck 60 compute-sanitizer --error-exitcode 3 "${check[@]}" sample
  stage racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 3 "${check[@]}" sample
else
  echo "== compute-sanitizer: not installed"
fi
stage times 200 "${check[@]}" times && cat "$out/times.log"
if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all ok in $SECONDS s"
