#!/usr/bin/env bash
# Everything that only a GPU can show, in at most ten minutes and without a network:
#
#     benchmarks/gpu_check.sh OUTDIR [PART ...]
#
# Parts, in this order: build, suite, driver, sanitizers, benchmarks; without names, all. OUTDIR gets one
# log a part, the benchmarks' JSON, benchmarks.done and summary.json. No part, test or benchmark that has
# passed for the same sources is run again, so that a call which ran out of time is finished by calling again.
# Python needs jax with its CUDA plugin, the build and test requirements of pyproject.toml, and nvcc.
set -uo pipefail

if (($# == 0)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
shift
parts=("$@")
((${#parts[@]})) || parts=(build suite driver sanitizers benchmarks)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

readonly BUDGET=590 # seconds of one call: ten minutes, less what the summary takes
python=${PYTHON:-python3}
work=${TMPDIR:-/tmp}/jax_hkv_gpu_check # what is compiled stays here: OUTDIR is for reading
site=$work/site
mkdir -p "$work"
export PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes share the device
sources=$(find ffi jax_hkv tests examples benchmarks CMakeLists.txt pyproject.toml -type f \
  ! -path '*/results/*' ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)

build() {
  rm -rf "$site"
  "$python" -m pip install --no-index --no-build-isolation --no-deps --target "$site" \
    --config-settings=cmake.define.HKV_CUDA=ON . &&
    "$python" -P -c 'import jax, jax_hkv._cuda; print(jax.devices("gpu"))'
}

suite() {
  local workers=()
  if "$python" -c 'import xdist' 2>/dev/null; then
    workers=(-n 8) # the device is shared and mostly idle: host threads are what a test waits for
  fi
  local status=0 # tests that have passed for the same sources are left out: 5 if all are
  "$python" -P -m pytest -rs -p no:cacheprovider --durations=10 --passed="$work/passed-$sources" \
    "${workers[@]}" || status=$?
  ((status == 0 || status == 5))
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
  for tool in memcheck racecheck initcheck synccheck; do
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

benchmark() { # NAME COMMAND...: once for the same sources; what one shows does not wait for another
  local name=$1 log=$out/benchmarks.done
  shift
  if [[ -s $out/$name.json ]] && grep -qsx "$sources $name" "$log"; then
    printf '%s has passed before\n' "$name"
  else
    "$@" --out "$out/$name.json" && echo "$sources $name" >>"$log"
  fi
}

table() { # beside the ceiling of row operations
  nvcc -std=c++20 -O3 -arch=native benchmarks/random_gather.cu -o "$work/random_gather" &&
    "$python" benchmarks/table.py --budget 200 --gather "$work/random_gather" "$@"
}

benchmarks() {
  local peer=() failures=0
  if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    peer=(--peer-python "$python")
  fi
  benchmark profile_step "$python" benchmarks/profile_step.py || ((++failures))
  benchmark table table || ((++failures))
  benchmark train_step "$python" benchmarks/train_step.py "${peer[@]}" || ((++failures))
  benchmark skew "$python" benchmarks/skew.py || ((++failures))
  benchmark soak "$python" benchmarks/soak.py --seconds 60 || ((++failures))
  benchmark scaling "$python" benchmarks/scaling.py --budget 60 || ((++failures))
  ((failures == 0))
}

readonly SKIPPED=77 # as automake's tests say it

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
    $(declare -p out python work site sources SKIPPED)
    $(declare -f build suite compile_driver driver sanitizers benchmark table benchmarks)
    $part" >"$out/$part.log" 2>&1
  status=$?
  case $status in
    0) status=passed ;;
    "$SKIPPED") status=skipped ;;
    124 | 137) status="out of time" ;;
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
  for part in build suite driver sanitizers benchmarks; do
    printf '%s\n    "%s": "%s"' "$separator" "$part" "$(verdict_of "$part")"
    separator=,
  done
  printf '\n  }\n}\n'
}

for part in "${parts[@]}"; do
  case $part in
    build | suite | driver | sanitizers | benchmarks) ;;
    *)
      printf 'gpu_check: there is no part "%s"\n' "$part" >&2
      exit 2
      ;;
  esac
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
