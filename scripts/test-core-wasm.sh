#!/usr/bin/env bash
# Usage: scripts/test-core-wasm.sh [ARG]...
#
# Runs the routing core's own tests, all but the properties, compiled to wasm32-unknown-unknown
# under Node. Arguments go to the tests: a part of a name, --nocapture.
# The runner, wasm-bindgen-test-runner, must have the very version of wasm-bindgen in Cargo.lock;
# without one on PATH it is built into .cache/ once, which takes a minute or two.
# Last line: `N passed, N failed`. An ignored test, and a run without tests, count as failed.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "test-core-wasm: $*" >&2; echo "0 passed, 1 failed"; exit 1; }

command -v node >/dev/null || fail "node is needed, version 20 or later"
version=$(awk '/^name = "wasm-bindgen"$/ {getline; gsub(/version = |"/, ""); print}' Cargo.lock)
[[ -n $version ]] || fail "Cargo.lock names no wasm-bindgen"

has_version() { [[ $(wasm-bindgen-test-runner --version 2>/dev/null) == *" $version" ]]; }

install() { # ARG...
  # Unoptimised and without TLS, which only browsers' drivers are fetched with: half the time.
  CARGO_TARGET_DIR=$root/build CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --debug --no-default-features --root "$root" \
    --version "$version" "$@" wasm-bindgen-cli --bin wasm-bindgen-test-runner
}

if ! has_version; then
  root=$PWD/.cache/wasm-bindgen-$version
  export PATH=$root/bin:$PATH
  if ! has_version; then
    echo "test-core-wasm: building wasm-bindgen-test-runner $version into .cache/"
    # The versions its authors built with; a mirror of the registry may not have them all yet.
    install --locked ||
      { echo "test-core-wasm: trying without its lock file" && install; } ||
      fail "wasm-bindgen-cli $version cannot be installed"
    rm -rf "$root/build"
    has_version || fail "the runner installed has another version than $version"
  fi
fi

# A file of tests that says nothing of wasm would run no test there and pass.
for file in filter/core/tests/*.rs; do
  grep -qE '^extern crate pd_core_wasm_tests;|^#!\[cfg\(not\(target_family = "wasm"\)\)\]' "$file" ||
    fail "$file neither imports the tests' attribute (pd_core_wasm_tests) nor is native only"
done

log=$(mktemp)
trap 'rm -f "$log"' EXIT
code=0
# The runner's own stack says nothing of a failed test; Node's is shown with it.
# The verdicts of the single suites are left out: who reads the last line must not count them too.
RUST_BACKTRACE=0 cargo test --locked --no-fail-fast --target wasm32-unknown-unknown -p pd-core --tests -- "$@" 2>&1 |
  tee "$log" | sed '/^test result: /d' || code=$?

read -r passed failed < <(
  sed -nE 's/^test result: .* ([0-9]+) passed; ([0-9]+) failed; ([0-9]+) ignored.*/\1 \2 \3/p' "$log" |
    awk '{passed += $1; failed += $2 + $3} END {print passed + 0, failed + 0}')
if [[ $failed -eq 0 && ($code -ne 0 || $passed -eq 0) ]]; then
  echo "test-core-wasm: the tests ended with code $code after $passed passed" >&2
  failed=1
fi
echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
