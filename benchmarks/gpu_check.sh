#!/usr/bin/env bash
# Everything that only a GPU can show, in at most ten minutes (or BUDGET seconds) and without a network:
#
#     benchmarks/gpu_check.sh OUTDIR [PART ...]
#
# Parts, in this order: build, driver (small batches), suite (the tests that run on a CPU and on a GPU, there),
# benchmarks, sanitizers, large (tests of full size), layers (tests without a platform of their own, with the GPU as
# the default), thorough (large batches of the driver), others (all other tests, most of which need no GPU); without
# names, all.
# Driver, suite, sanitizers and large give up after a share of the time (seconds_of) where others follow, and go
# on at the next call.
# OUTDIR gets one log a part, the benchmarks' JSON, what has passed and summary.json: some two dozen files, all of
# which belong together. No part, test, tool or case of a benchmark that has passed for the same sources (the
# package's; and those of the tests or of the benchmarks) is run again, so that a call which ran out of time is
# finished by calling again with the same OUTDIR, or with a copy of it on another machine.
# Python needs jax with its CUDA plugin, the build and test requirements of pyproject.toml, and nvcc. Where time on
# the device is short, `benchmarks/gpu_check.sh OUTDIR prepare` compiles for an H200 beforehand, on any machine
# with nvcc and such a Python, 3.12 or newer (whose wheel serves all newer ones): what it leaves in wheelhouse/ is
# taken there for the same sources. COMMIT, if it is set, names the commit instead of the repository.
set -uo pipefail

if (($# == 0)); then
  sed -n '2,/^set /{s/^# \{0,1\}//p}' "$0"
  exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
shift
parts=("$@")
readonly PARTS=(build driver suite benchmarks sanitizers large layers thorough others)
((${#parts[@]})) || parts=("${PARTS[@]}")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

readonly BUDGET=${BUDGET:-570} # seconds of one call: ten minutes, less what comes before and after the parts
python=${PYTHON:-python3}
work=${TMPDIR:-/tmp}/jax_hkv_gpu_check # what is compiled stays here: OUTDIR is for reading
site=$work/site
mkdir -p "$work"
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null)}
export PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes share the device
export XLA_PYTHON_CLIENT_MEM_FRACTION=.9   # and the largest of them may have nearly all of it
digest_of() { # FILES AND FOLDERS
  find "$@" -type f ! -path '*/results/*' ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum |
    sha256sum | cut -c1-16
}
# What is compiled does not depend on the tests and benchmarks in Python, nor these on each other: a line that is
# mended in one while a device waits does not have all the others begin anew.
readonly COMPILED=(ffi jax_hkv tests/cpp benchmarks/random_gather.cu CMakeLists.txt pyproject.toml)
built=$(digest_of "${COMPILED[@]}")
tested=$(digest_of "${COMPILED[@]}" tests examples)
measured=$(digest_of "${COMPILED[@]}" benchmarks examples)
everything=$(digest_of "${COMPILED[@]}" benchmarks examples tests) # tests of the benchmarks are among others
prebuilt=wheelhouse/$built

sources_of() { # PART
  case $1 in
    suite | large | layers) echo "$tested" ;;
    others) echo "$everything" ;;
    benchmarks) echo "$measured" ;;
    *) echo "$built" ;;
  esac
}

prepare() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12) and "prepare: PYTHON must be 3.12 or newer")' || return
  mkdir -p "$prebuilt"
  "$python" -m pip wheel --no-index --no-build-isolation --no-deps --wheel-dir "$prebuilt" \
    --config-settings=cmake.define.HKV_CUDA=ON . &&
    compile_driver "$prebuilt" -arch=sm_90 && compile_gather "$prebuilt" -arch=sm_90
}

install() { # A project or a wheel
  rm -rf "$site"
  "$python" -m pip install --no-index --no-build-isolation --no-deps --target "$site" \
    --config-settings=cmake.define.HKV_CUDA=ON "$1" &&
    "$python" -P -c 'import jax, jax_hkv._cuda; print(jax.devices("gpu"))'
}

build() {
  local wheel
  for wheel in "$prebuilt"/*.whl; do # of the Pythons that prepared them one may be like this
    [[ -s $wheel ]] && install "$wheel" && return
  done
  "$python" -c 'import os, sysconfig; print(os.listdir(sysconfig.get_path("include"))[:3])'
  install .
}

# NAME COMPILE: where the program is, in $program; compiled if nobody has yet.
have() {
  program=$prebuilt/$1
  # Not where the system's libraries are older than those that it was linked with.
  [[ -x $program ]] && ! ldd "$program" 2>&1 | grep 'not found' && return
  program=$work/$built/$1
  mkdir -p "$work/$built"
  [[ -x $program ]] || "$2" "$work/$built" -arch=native
}

run_tests() { # NAME WORKERS TESTS...
  local workers=() name=$1 count=$2
  shift 2
  if ((count > 1)) && "$python" -c 'import xdist' 2>/dev/null; then
    # The device is shared and mostly idle: host threads are what a test waits for. The other ways to share
    # tests out repeat what a file prepares, or do not survive a worker that dies.
    workers=(-n "$count" --dist worksteal)
  fi
  local status=0 passed=$out/$name-$(sources_of "$name").passed
  # A kernel that faults ends its process's device: what fails behind it says nothing more.
  "$python" -P -m pytest -rs -p no:cacheprovider --durations=10 --maxfail=20 --passed="$passed" \
    "${workers[@]}" "$@" || status=$?
  # Tests that have passed for the same sources are left out: 5 if all are.
  ((status == 0)) || [[ $status == 5 && -s $passed ]]
}

suite() { # with the CPU as JAX's default, for meshes of eight; all that is called twice is a CUDA graph then
  XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_graph_min_graph_size=1" JAX_PLATFORMS=cpu,cuda \
    run_tests suite 12 --needs-gpu -k 'gpu and not gpu_program'
}

others() {
  JAX_PLATFORMS=cpu,cuda run_tests others 12 -k 'not gpu or gpu_program'
}

layers() { # XLA's products are to be those of float32, as on a CPU
  local name files=()
  for name in admission checkpoint collection dense_equality expire fused layer_edges layers metrics optim \
    pooled training transformations two_tower; do
    files+=("tests/test_$name.py")
  done
  JAX_PLATFORMS=cuda,cpu JAX_DEFAULT_MATMUL_PRECISION=highest run_tests layers 12 -k 'not cpu and not gpu' \
    "${files[@]}"
}

large() { # one after the other: there is one memory
  export XLA_PYTHON_CLIENT_PREALLOCATE=true # in one piece: memory that grows by pieces has gaps
  run_tests large 1 --slow --needs-gpu -k gpu tests/test_large.py
}

compile_driver() { # FOLDER ARCHITECTURE
  nvcc -std=c++20 -O3 -lineinfo "$2" -fmad=false --expt-relaxed-constexpr \
    -Xcompiler=-ffp-contract=off -Iffi -Itests/cpp tests/cpp/device_driver.cu -o "$1/unfinished" &&
    mv "$1/unfinished" "$1/device_driver"
}

compile_gather() {
  nvcc -std=c++20 -O3 "$2" benchmarks/random_gather.cu -o "$1/unfinished" && mv "$1/unfinished" "$1/random_gather"
}

driver() {
  have device_driver compile_driver && "$program" small
}

thorough() { # the host makes and compares gigabytes, while the device waits
  have device_driver compile_driver && "$program"
}

# PART NAME: what a part need not do again for the same sources.
has_passed() {
  grep -qsx "$(sources_of "$1") $2" "$out/$1.done" && printf '%s has passed before\n' "$2"
}
mark_passed() {
  echo "$(sources_of "$1") $2" >>"$out/$1.done"
}

# Some runtimes let no tool watch the device: that is said, and is no failure.
sanitizers() {
  command -v compute-sanitizer || return "$SKIPPED"
  have device_driver compile_driver || return 1
  local tool status log=$work/sanitizer.log failures=0 refusals=0 unfinished=0
  for tool in memcheck synccheck initcheck racecheck; do # those first that see most
    printf '== %s\n' "$tool"
    has_passed sanitizers "$tool" && continue
    status=0
    local left=$((seconds - SECONDS - 10)) # in a group of its own, which ends the driver too, in time
    ((left > 0)) || { unfinished=$((unfinished + 1)) && break; }
    ((left < ${TOOL_SECONDS:-240})) || left=${TOOL_SECONDS:-240}
    timeout --kill-after=5 "$left" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$program" watched >"$log" 2>&1 || status=$?
    cat "$log"
    if grep -q 'Device not supported' "$log"; then
      refusals=$((refusals + 1))
    elif ((status == 0)); then
      mark_passed sanitizers "$tool"
    elif ((status == OUT_OF_TIME)); then
      unfinished=$((unfinished + 1))
    else
      failures=$((failures + 1))
    fi
  done
  ((failures == 0)) || return 1
  ((refusals == 0)) || return "$SKIPPED"
  ((unfinished == 0)) || return "$OUT_OF_TIME"
}

# NAME COMMAND...: once for the same sources; what one shows does not wait for another. One that left cases
# out for lack of time goes on with them at the next call.
benchmark() {
  local name=$1 json=$out/$1.json
  shift
  [[ -s $json ]] && has_passed benchmarks "$name" && return
  if ! grep -qsx "$measured $name" "$out/benchmarks.begun"; then
    rm -f "$json"
    echo "$measured $name" >>"$out/benchmarks.begun"
  fi
  "$@" --out "$json" || return 1
  if grep -q '"left_out": \[$' "$json"; then
    printf '%s has left cases out\n' "$name"
    return "$OUT_OF_TIME"
  fi
  mark_passed benchmarks "$name"
}

beside_a_gather() { # the ceiling of row operations
  have random_gather compile_gather && "$python" "$@" --gather "$program"
}

benchmarks() {
  local peer=() failures=0 unfinished=0
  count() {
    if (($1 == OUT_OF_TIME)); then ((++unfinished)); else ((++failures)); fi
  }
  if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    peer=(--peer-python "$python")
  fi
  export XLA_PYTHON_CLIENT_PREALLOCATE=true # a process at a time has the device
  benchmark profile_step "$python" benchmarks/profile_step.py || count $?
  benchmark profile_table "$python" benchmarks/profile_table.py --dims 8 --choices 1 || count $?
  benchmark table beside_a_gather benchmarks/table.py --resume --budget 200 || count $?
  benchmark row_operations beside_a_gather benchmarks/row_operations.py --resume || count $?
  benchmark train_step "$python" benchmarks/train_step.py --resume "${peer[@]}" || count $?
  benchmark skew "$python" benchmarks/skew.py || count $?
  benchmark tiers "$python" benchmarks/tiers.py || count $?
  benchmark soak "$python" benchmarks/soak.py --resume --seconds 60 || count $?
  benchmark scaling "$python" benchmarks/scaling.py --resume --budget 100 || count $?
  ((failures == 0)) || return 1
  ((unfinished == 0)) || return "$OUT_OF_TIME"
}

readonly SKIPPED=77      # as automake's tests say it
readonly OUT_OF_TIME=124 # as timeout says it

# PART: of the time that is left, while others wait.
seconds_of() {
  local left=$((BUDGET - SECONDS)) share
  case $1 in
    driver) share=120 ;; # and nvcc's time, where nothing was prepared
    suite) share=200 ;;
    sanitizers | large) share=260 ;; # a tool, or a test of full size
    *) share=$left ;;
  esac
  [[ $1 != "${parts[-1]}" ]] && ((share < left)) && left=$share
  echo "$left"
}

verdict_of() { # the last line of a part's log, if it is a verdict on these sources
  tail -n 1 "$out/$1.log" 2>/dev/null | sed -n "s/^gpu_check $(sources_of "$1"): //p"
}

run_part() {
  local part=$1 begin=$SECONDS status
  local result=$out # what a part leaves behind, if it leaves anything
  [[ $part == build ]] && result=$site
  [[ $part == prepare ]] && result=$prebuilt/random_gather
  if [[ $(verdict_of "$part") == passed* && -e $result ]]; then
    return
  fi
  local seconds
  seconds=$(seconds_of "$part")
  if ((seconds <= 0)); then
    printf 'gpu_check %s: out of time\n' "$(sources_of "$part")" >"$out/$part.log"
    return
  fi
  # A shell of its own, so that the time limit holds for all that a part starts; its SECONDS begin at 0.
  timeout --kill-after=5 "$seconds" bash -c "
    $(declare -p seconds out python work site built tested measured everything prebuilt SKIPPED OUT_OF_TIME)
    $(declare -f)
    $part" >"$out/$part.log" 2>&1
  status=$?
  case $status in
    0) status=passed ;;
    "$SKIPPED") status=skipped ;;
    "$OUT_OF_TIME" | 137) status="out of time" ;;
    *) status="failed ($status)" ;;
  esac
  printf '\ngpu_check %s: %s after %d s\n' "$(sources_of "$part")" "$status" $((SECONDS - begin)) >>"$out/$part.log"
}

summary() {
  local part separator='' device='none found'
  if command -v nvidia-smi >/dev/null; then
    device=$(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv,noheader)
  fi
  printf '{\n  "sources": "%s",\n  "commit": "%s",\n  "device": "%s",\n  "parts": {' "$built $tested $measured" \
    "$commit" "$(head -n 1 <<<"$device")"
  for part in "${PARTS[@]}"; do
    printf '%s\n    "%s": "%s"' "$separator" "$part" "$(verdict_of "$part")"
    separator=,
  done
  printf '\n  }\n}\n'
}

for part in "${parts[@]}"; do
  if [[ " prepare ${PARTS[*]} " != *" $part "* ]]; then
    printf 'gpu_check: there is no part "%s"\n' "$part" >&2
    exit 2
  fi
done
for part in "${parts[@]}"; do
  printf '== %4d s  %s\n' "$SECONDS" "$part"
  run_part "$part"
  printf '           %s\n' "$(verdict_of "$part")"
  if [[ $part == @(prepare|build) && $(verdict_of "$part") != passed* ]]; then
    tail -n 30 "$out/$part.log"
    break
  fi
done
summary | tee "$out/summary.json"
for part in "${parts[@]}"; do
  [[ $(verdict_of "$part") == @(passed|skipped)* ]] || exit 1
done
