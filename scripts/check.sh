#!/usr/bin/env bash
# Usage: scripts/check.sh
#
# Formatting, clippy natively and for wasm with warnings as errors, the rules about which crate may
# depend on what, and that every test module is declared. Ends with the number of checks.
set -euo pipefail
cd "$(dirname "$0")/.."

passed=0 failed=0
check() { # NAME COMMAND...
  local name=$1
  shift
  echo "check: $name"
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "check: FAILED: $name" >&2; fi
}

# The dependencies of a crate as built into programs, one name a line.
dependencies() { cargo tree --locked -p "$1" --edges normal,build --prefix none --target "${2:-all}" | awk '{print $1}' | sort -u; }

depends_on_none_of() { # CRATE NAME...
  local crate=$1 found names
  shift
  names=$(dependencies "$crate") || return 1
  grep -qx "$crate" <<<"$names" || { echo "cargo tree says nothing about $crate" >&2; return 1; }
  found=$(grep -Fxf <(printf '%s\n' "$@") <<<"$names" || true)
  [[ -z $found ]] || { echo "$crate must not depend on:" $found >&2; return 1; }
}

# A test file that nobody declares is never compiled.
test_modules_declared() {
  local file stem folder parents missing=0
  while read -r file; do
    stem=$(basename "$file" .rs) folder=$(dirname "$file")
    # The roots of targets; a file right in tests/ is one unless there is a main.rs.
    [[ $stem == main || $stem == lib ]] && continue
    [[ $(basename "$folder") == tests && ! -f $folder/main.rs ]] && continue
    if [[ $stem == mod ]]; then
      stem=$(basename "$folder") folder=$(dirname "$folder")
      parents=("$folder"/*.rs)
    else
      parents=("$folder"/{main,lib,mod}.rs "$folder.rs")
    fi
    grep -qsE "^\s*(pub(\([a-z]+\))? )?mod $stem;" "${parents[@]}" ||
      { echo "$file is declared nowhere" >&2; missing=1; }
  done < <(git ls-files -co --exclude-standard '*/tests/*.rs' '*/tests.rs' |
    grep -E '/tests\.rs$|^[^.]*/tests/[^.]*\.rs$' | grep -vE '^tests/[a-z]+/(core/|fixture/)?src/.*[^s]\.rs$')
  return $missing
}

# A setting that nothing reads does nothing; README then has to say so.
settings_read() {
  local field name variable unread=0 sources without
  sources=$(git ls-files -co --exclude-standard filter/core/src filter/src control-agent/src |
    grep '\.rs$' | grep -vE '/tests(\.rs|/)|/testkit/')
  without=$(sed -n '/^- Settings without effect/,/^$/p' README.md)
  while read -r field name variable; do
    grep -qE "\.$field\b|\"$variable\"" $sources || grep -qF "\`$name\`" <<<"$without" ||
      { echo "$name ($field) is read nowhere, and README does not say so" >&2; unread=1; }
  done < <(awk '/^    [a-z_0-9]+: .* = / { field = $1; sub(":", "", field); next }
    field != "" && /^    "/ {
      split($0, quoted, "\"")
      variable = match($0, /env "[A-Z_0-9]+"/) ? substr($0, RSTART + 5, RLENGTH - 6) : "-"
      print field, quoted[2], variable
      field = ""
    }' filter/wire/src/knobs/table.rs)
  return $unread
}

check "formatting" cargo fmt --all --check
check "clippy, native" cargo clippy --locked --workspace --exclude pd-filter --all-targets -- -D warnings
check "clippy, wasm" cargo clippy --locked --release -p pd-filter --target wasm32-wasip1 -- -D warnings
check "clippy, wasm with tokenizers" cargo clippy --locked --release -p pd-filter --features tokenizers \
  --target wasm32-wasip1 -- -D warnings
check "pd-core knows no host, clock or network" depends_on_none_of pd-core \
  proxy-wasm tokio hyper kube k8s-openapi redis tracing-subscriber rand getrandom chrono time
check "pd-wire is data only" depends_on_none_of pd-wire \
  proxy-wasm tokio hyper kube k8s-openapi redis rand getrandom
check "tokens are counted without C, files and network" depends_on_none_of pd-tokenizer \
  onig hf-hub ureq tokio hyper pd-core
check "the agent does not know the routing core" depends_on_none_of pd-agent pd-core pd-filter pd-tokenizer proxy-wasm
check "every test module is declared" test_modules_declared
check "every setting is read" settings_read
check "generated documentation" scripts/gen-docs.sh --check README.md envoy/standalone/listeners.yaml
check "scripts parse" bash -n scripts/*.sh .ci/run

echo "check: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
