#!/usr/bin/env bash
# Usage: scripts/validate-envoy.sh [ENVOY]...
#
# Loads every configuration in envoy/ into Envoy with the built filter: once in validation mode,
# and once for real, since only a running Envoy takes the listeners file. Without arguments the
# Envoy of scripts/envoy.sh and the oldest supported one are used.
set -euo pipefail
cd "$(dirname "$0")/.."

wasm=${PD_FILTER_WASM:-${CARGO_TARGET_DIR:-target}/wasm32-wasip1/release/pd_filter.wasm}
[[ -f $wasm ]] || { echo "validate-envoy: $wasm is missing, run scripts/build-wasm.sh" >&2; exit 1; }
envoys=("$@")
[[ $# -gt 0 ]] || envoys=("$(scripts/envoy.sh)" "$(scripts/envoy.sh --oldest)")

run=$(mktemp -d)
pid=
finish() {
  if [[ -n $pid ]]; then kill "$pid" 2>/dev/null || true; wait "$pid" 2>/dev/null || true; fi
  rm -rf "$run"
}
trap finish EXIT

# The listeners file as static_resources, which is what validation mode looks at.
static_form() { # LISTENERS
  echo "admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}"
  echo "static_resources:"
  sed -n '/^  clusters:/,/^$/p' envoy/standalone/envoy.yaml
  sed -e 's/^resources:/  listeners:/' -e '/^- "@type"/{s/.*/-/;N;s/\n */ /}' -e 's/^/  /' -e 's/^    listeners:/  listeners:/' "$1"
}

passed=0 failed=0
verdict() { # NAME LOG CODE
  if [[ $3 -eq 0 ]]; then passed=$((passed + 1)); echo "ok      $1"; return; fi
  failed=$((failed + 1))
  echo "FAILED  $1"
  grep -E '\[(error|critical|warning)\]|^error' "$2" | head -20 || tail -20 "$2"
}

loads() { # ENVOY LOG
  "$1" -c "$run/envoy.yaml" --concurrency 1 --disable-hot-restart --admin-address-path "$run/admin" >"$2" 2>&1 &
  pid=$!
  local code=1 admin stats
  for _ in $(seq 100); do
    kill -0 "$pid" 2>/dev/null || break
    if admin=$(cat "$run/admin" 2>/dev/null) && stats=$(curl -sf "$admin/stats?filter=lds.update_"); then
      if grep -q 'update_success: [1-9]' <<<"$stats"; then code=0; break; fi
      if grep -q 'update_rejected: [1-9]' <<<"$stats"; then break; fi
    fi
    sleep 0.1
  done
  kill "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
  pid=
  rm -f "$run/admin"
  return $code
}

for envoy in "${envoys[@]}"; do
  version=$("$envoy" --version | grep -oE '/[0-9]+\.[0-9]+\.[0-9]+' | head -1 | tr -d /)
  scripts/render-envoy.sh envoy/standalone/envoy.yaml ADMIN_PORT=0 LISTENERS="$run/listeners.yaml" >"$run/envoy.yaml"
  scripts/render-envoy.sh envoy/standalone/listeners.yaml DATA_PORT=0 CONTROL_PORT=0 WASM="$wasm" >"$run/listeners.yaml"
  static_form "$run/listeners.yaml" >"$run/static.yaml"
  code=0
  "$envoy" --mode validate -c "$run/envoy.yaml" >"$run/log" 2>&1 || code=$?
  verdict "$version: envoy/standalone/envoy.yaml is valid" "$run/log" $code
  code=0
  "$envoy" --mode validate -c "$run/static.yaml" >"$run/log" 2>&1 || code=$?
  verdict "$version: envoy/standalone/listeners.yaml is valid" "$run/log" $code
  code=0
  loads "$envoy" "$run/log" || code=$?
  verdict "$version: envoy/standalone loads in a running Envoy" "$run/log" $code
done

echo "validate-envoy: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
