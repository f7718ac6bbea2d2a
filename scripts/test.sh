#!/usr/bin/env bash
# Usage: scripts/test.sh [TIER]...
#
# Every test there is, in this order; with arguments, only these tiers:
#   check      formatting, lints, dependency rules
#   native     unit, property and golden tests
#   core-wasm  the routing core again, compiled to wasm, under Node
#   host       the built filter.wasm in a wasmtime host
#   configs    every shipped Envoy configuration in real Envoys
#   e2e        real Envoy, agent and simulated engines
#   demo       what README tells a newcomer to run first
# Last line: `N passed, N failed`. A test that is ignored, and a tier that ran nothing, count as
# failed. What is missing (wasm targets, Envoy, the test runner for Node) is installed first.
set -euo pipefail
cd "$(dirname "$0")/.."

all=(check native core-wasm host configs e2e demo)
tiers=("$@")
[[ $# -gt 0 ]] || tiers=("${all[@]}")
for tier in "${tiers[@]}"; do
  [[ " ${all[*]} " == *" $tier "* ]] || { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
done

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
target=${CARGO_TARGET_DIR:-target}
passed=0 failed=0 summary=()

# run TIER COMMAND...: runs and counts the verdicts that the command prints: cargo's
# "N passed; N failed; N ignored" or our scripts' "N passed, N failed".
run() {
  local tier=$1 log=$logs/$1 code=0 counts ok bad start=$SECONDS
  shift
  echo "test: $tier: $*"
  # Appends: a tier may take several commands.
  "$@" 2>&1 | tee "$log.now" || code=$?
  counts=$(sed 's/\x1b\[[0-9;]*m//g' "$log.now" |
    sed -nE 's/.*(^|[^0-9])([0-9]+) passed[;,] ([0-9]+) failed(; ([0-9]+) ignored)?.*/\2 \3 \5/p')
  ok=$(awk '{n += $1} END {print n + 0}' <<<"$counts")
  bad=$(awk '{n += $2 + $3} END {print n + 0}' <<<"$counts")
  if [[ $code -ne 0 && $bad -eq 0 ]]; then
    bad=1
    echo "test: $tier: ended with code $code" >&2
  elif [[ $ok -eq 0 && $bad -eq 0 ]]; then
    bad=1
    echo "test: $tier: nothing ran" >&2
  fi
  passed=$((passed + ok)) failed=$((failed + bad))
  summary+=("$(printf '%-10s %5d passed %3d failed  %4d s  %s' "$tier" "$ok" "$bad" $((SECONDS - start)) "$*")")
}

# Builds what the later tiers use; a build that fails is a failed test.
built=
build() {
  [[ -z $built ]] || return 0
  built=yes
  scripts/build-wasm.sh --variant tokenizers --variant trap --variant next && cargo build --locked -p pd-agent -p pd-engine-sim
}

demo() {
  local last
  scripts/demo.sh --once | tee "$logs/demo.out"
  last=$(tail -n 1 "$logs/demo.out")
  [[ $last =~ ^demo:\ ([0-9]+)\ of\ ([0-9]+)\ requests\ ok$ ]] || { echo "the demo did not finish"; return 1; }
  echo "demo: ${BASH_REMATCH[1]} passed, $((BASH_REMATCH[2] - BASH_REMATCH[1])) failed"
}

needs() { # COMMAND...: a preparation whose failure is a failed test
  "$@" || { failed=$((failed + 1)); summary+=("$* FAILED"); return 1; }
}

if command -v rustup >/dev/null; then
  for wasm in wasm32-wasip1 wasm32-unknown-unknown; do
    rustup target list --installed | grep -qx "$wasm" || rustup target add "$wasm"
  done
fi

for tier in "${tiers[@]}"; do
  case $tier in
    check) run check scripts/check.sh ;;
    native) run native cargo test --locked --no-fail-fast -p pd-alloc -p pd-wire -p pd-core -p pd-tokenizer -p pd-agent -p pd-engine-sim -p pd-failure-matrix -p pd-bench ;;
    core-wasm) run core-wasm scripts/test-core-wasm.sh ;;
    host) if needs build; then run host cargo test --locked --no-fail-fast -p pd-wasm-tests; fi ;;
    configs) if needs build; then run configs scripts/validate-envoy.sh; fi ;;
    e2e)
      if needs build; then
        # Envoys are resolved once, not by every test.
        ENVOY=$(scripts/envoy.sh) ENVOY_OLDEST=$(scripts/envoy.sh --oldest)
        export ENVOY ENVOY_OLDEST
        run e2e cargo test --locked -p pd-e2e -- --test-threads=4
      fi ;;
    demo) run demo demo ;;
  esac
done

echo
printf '%s\n' "${summary[@]}"
echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
