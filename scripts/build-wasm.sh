#!/usr/bin/env bash
# Usage: scripts/build-wasm.sh [--variant tokenizers|trap|next]...
#
# Builds target/wasm32-wasip1/release/pd_filter.wasm and prints its size. "tokenizers" also makes
# pd_filter_tokenizers.wasm beside it, which counts prompts with the tokenizers the agent pushes.
# The other variants, which only tests use, go to target/e2e/: "trap" panics when a request asks
# for it, "next" writes the next record format.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

variants=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --variant) variants+=("${2:?--variant needs a name}"); shift 2 ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done

build() { # FEATURES FILE
  cargo build --release --locked --target wasm32-wasip1 -p pd-filter ${1:+--features "$1"}
  local built=$target/wasm32-wasip1/release/pd_filter.wasm
  if [[ $2 != "$built" ]]; then
    mkdir -p "$(dirname "$2")"
    cp "$built" "$2"
  fi
  echo "$2: $(stat -c %s "$2") bytes"
}

for variant in "${variants[@]}"; do
  case $variant in
    tokenizers) build tokenizers "$target/wasm32-wasip1/release/pd_filter_tokenizers.wasm" ;;
    trap) build test-trap "$target/e2e/pd_filter_trap.wasm" ;;
    next) build format-2 "$target/e2e/pd_filter_next.wasm" ;;
    *) echo "build-wasm: no variant '$variant'" >&2; exit 2 ;;
  esac
done
# Last, so that the plain filter is what stays in the release folder.
build "" "$target/wasm32-wasip1/release/pd_filter.wasm"
