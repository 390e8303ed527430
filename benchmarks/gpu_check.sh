#!/usr/bin/env bash
# Everything that only a GPU can show, in at most ten minutes and without a network:
#
#     benchmarks/gpu_check.sh OUTDIR [PART ...]
#
# Parts, in this order: build, driver, sanitizers, suite (with the CPU as JAX's default, for meshes of eight),
# layers (tests without a platform of their own, with the GPU as the default), large (tests of full size),
# benchmarks; without names, all.
# OUTDIR gets one log a part, the benchmarks' JSON, benchmarks.begun, benchmarks.done and summary.json. No part,
# test or case of a benchmark that has passed for the same sources is run again, so that a call which ran out of
# time is finished by calling again with the same OUTDIR.
# Python needs jax with its CUDA plugin, the build and test requirements of pyproject.toml, and nvcc.
set -uo pipefail

if (($# == 0)); then
  sed -n '2,12s/^# \{0,1\}//p' "$0"
  exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
shift
parts=("$@")
readonly PARTS=(build driver sanitizers suite layers large benchmarks)
((${#parts[@]})) || parts=("${PARTS[@]}")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

readonly BUDGET=570 # seconds of one call: ten minutes, less what comes before and after the parts
python=${PYTHON:-python3}
work=${TMPDIR:-/tmp}/jax_hkv_gpu_check # what is compiled stays here: OUTDIR is for reading
site=$work/site
mkdir -p "$work"
export PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes share the device
export XLA_PYTHON_CLIENT_MEM_FRACTION=.9   # and the largest of them may have nearly all of it
sources=$(find ffi jax_hkv tests examples benchmarks CMakeLists.txt pyproject.toml -type f \
  ! -path '*/results/*' ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)

build() {
  rm -rf "$site"
  "$python" -c 'import os, sysconfig; print(os.listdir(sysconfig.get_path("include"))[:3])'
  "$python" -m pip install --no-index --no-build-isolation --no-deps --target "$site" \
    --config-settings=cmake.define.HKV_CUDA=ON . &&
    "$python" -P -c 'import jax, jax_hkv._cuda; print(jax.devices("gpu"))'
}

run_tests() { # NAME WORKERS TESTS...
  local workers=() name=$1 count=$2
  shift 2
  if ((count > 1)) && "$python" -c 'import xdist' 2>/dev/null; then
    # The device is shared and mostly idle: host threads are what a test waits for. The other ways to share
    # tests out repeat what a file prepares, or do not survive a worker that dies.
    workers=(-n "$count" --dist worksteal)
  fi
  local status=0 passed=$work/passed-$name-$sources
  "$python" -P -m pytest -rs -p no:cacheprovider --durations=10 --passed="$passed" \
    "${workers[@]}" "$@" || status=$?
  # Tests that have passed for the same sources are left out: 5 if all are.
  ((status == 0)) || [[ $status == 5 && -s $passed ]]
}

suite() {
  JAX_PLATFORMS=cpu,cuda run_tests suite 8
}

layers() { # XLA's products are to be those of float32, as on a CPU
  local name files=()
  for name in admission checkpoint collection dense_equality expire fused layer_edges layers metrics optim \
    pooled training transformations two_tower; do
    files+=("tests/test_$name.py")
  done
  JAX_PLATFORMS=cuda,cpu JAX_DEFAULT_MATMUL_PRECISION=highest run_tests layers 8 "${files[@]}"
}

large() { # one after the other: there is one memory
  run_tests large 1 --slow -k gpu tests/test_large.py
}

compile_driver() {
  nvcc -std=c++20 -O3 -lineinfo -arch=native -fmad=false --expt-relaxed-constexpr \
    -Xcompiler=-ffp-contract=off -Iffi -Itests/cpp tests/cpp/device_driver.cu -o "$work/device_driver"
}

driver() {
  compile_driver && "$work/device_driver"
}

# Some runtimes let no tool watch the device: that is said, and is no failure.
sanitizers() {
  command -v compute-sanitizer || return "$SKIPPED"
  compile_driver || return 1
  local tool log=$work/sanitizer.log failures=0 refusals=0
  for tool in memcheck synccheck initcheck racecheck; do # those first that see most
    printf '== %s\n' "$tool"
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$work/device_driver" small >"$log" 2>&1 ||
      failures=$((failures + 1))
    cat "$log"
    if grep -q 'Device not supported' "$log"; then
      refusals=$((refusals + 1))
    fi
  done
  ((refusals == 0)) || return "$SKIPPED"
  ((failures == 0))
}

# NAME COMMAND...: once for the same sources; what one shows does not wait for another. One that left cases
# out for lack of time goes on with them at the next call.
benchmark() {
  local name=$1 json=$out/$1.json
  shift
  if [[ -s $json ]] && grep -qsx "$sources $name" "$out/benchmarks.done"; then
    printf '%s has passed before\n' "$name"
    return
  fi
  if ! grep -qsx "$sources $name" "$out/benchmarks.begun"; then
    rm -f "$json"
    echo "$sources $name" >>"$out/benchmarks.begun"
  fi
  "$@" --out "$json" || return 1
  if grep -q '"left_out": \[$' "$json"; then
    printf '%s has left cases out\n' "$name"
    return "$OUT_OF_TIME"
  fi
  echo "$sources $name" >>"$out/benchmarks.done"
}

table() { # beside the ceiling of row operations
  nvcc -std=c++20 -O3 -arch=native benchmarks/random_gather.cu -o "$work/random_gather" &&
    "$python" benchmarks/table.py --resume --budget 200 --gather "$work/random_gather" "$@"
}

benchmarks() {
  local peer=() failures=0 unfinished=0
  count() {
    if (($1 == OUT_OF_TIME)); then ((++unfinished)); else ((++failures)); fi
  }
  if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    peer=(--peer-python "$python")
  fi
  benchmark profile_step "$python" benchmarks/profile_step.py || count $?
  benchmark table table || count $?
  benchmark train_step "$python" benchmarks/train_step.py "${peer[@]}" || count $?
  benchmark skew "$python" benchmarks/skew.py || count $?
  benchmark soak "$python" benchmarks/soak.py --seconds 60 || count $?
  benchmark scaling "$python" benchmarks/scaling.py --resume --budget 100 || count $?
  ((failures == 0)) || return 1
  ((unfinished == 0)) || return "$OUT_OF_TIME"
}

readonly SKIPPED=77      # as automake's tests say it
readonly OUT_OF_TIME=124 # as timeout says it

verdict_of() { # the last line of a part's log, if it is a verdict on these sources
  tail -n 1 "$out/$1.log" 2>/dev/null | sed -n "s/^gpu_check $sources: //p"
}

run_part() {
  local part=$1 begin=$SECONDS status
  if [[ $(verdict_of "$part") == passed* && ($part != build || -d $site) ]]; then
    return
  fi
  if ((SECONDS >= BUDGET)); then
    printf 'gpu_check %s: out of time\n' "$sources" >"$out/$part.log"
    return
  fi
  # A shell of its own, so that the time limit holds for all that a part starts.
  timeout --kill-after=5 $((BUDGET - SECONDS)) bash -c "
    $(declare -p out python work site sources SKIPPED OUT_OF_TIME)
    $(declare -f)
    $part" >"$out/$part.log" 2>&1
  status=$?
  case $status in
    0) status=passed ;;
    "$SKIPPED") status=skipped ;;
    "$OUT_OF_TIME" | 137) status="out of time" ;;
    *) status="failed ($status)" ;;
  esac
  printf '\ngpu_check %s: %s after %d s\n' "$sources" "$status" $((SECONDS - begin)) >>"$out/$part.log"
}

summary() {
  local part separator='' device='none found'
  if command -v nvidia-smi >/dev/null; then
    device=$(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv,noheader)
  fi
  printf '{\n  "sources": "%s",\n  "commit": "%s",\n  "device": "%s",\n  "parts": {' "$sources" \
    "$(git rev-parse HEAD 2>/dev/null)" "$(head -n 1 <<<"$device")"
  for part in "${PARTS[@]}"; do
    printf '%s\n    "%s": "%s"' "$separator" "$part" "$(verdict_of "$part")"
    separator=,
  done
  printf '\n  }\n}\n'
}

for part in "${parts[@]}"; do
  if [[ " ${PARTS[*]} " != *" $part "* ]]; then
    printf 'gpu_check: there is no part "%s"\n' "$part" >&2
    exit 2
  fi
done
for part in "${parts[@]}"; do
  printf '== %4d s  %s\n' "$SECONDS" "$part"
  run_part "$part"
  printf '           %s\n' "$(verdict_of "$part")"
  if [[ $part == build && $(verdict_of build) != passed* ]]; then
    tail -n 30 "$out/build.log"
    break
  fi
done
summary | tee "$out/summary.json"
! grep -Eq '": "(failed|out of time)' "$out/summary.json"
