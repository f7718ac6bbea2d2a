#!/usr/bin/env bash
# Usage: scripts/demo.sh [--once]
#
# Builds everything, starts two prefill and two decode engines (simulated), the agent and a real
# Envoy on free loopback ports, sends requests and shows for each which pods served it, why, and
# how long it took. Stays up until Ctrl-C; --once ends after the requests, with exit code 0 only
# if every one went as it must. Needs Rust, Python 3 and curl; no cluster, no GPU.
set -euo pipefail
once=
case ${1:-} in
  "") ;;
  --once) once=yes ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
run=$(mktemp -d)
. scripts/gateway.sh

require_tools
envoy=$(scripts/envoy.sh)
say "building the filter, the agent and the simulated engines (the first time takes some minutes)"
scripts/build-wasm.sh
cargo build --locked -p pd-agent -p pd-engine-sim
target=${CARGO_TARGET_DIR:-target}
wasm=$target/wasm32-wasip1/release/pd_filter.wasm agent=$target/debug/pd-agent

# Engines: 150 ms to compute a prompt, 30 ms a token.
model=demo-model
pace='"prefill_delay_ms":150,"token_interval_ms":30,"tokens":12'
for name in prefill-r0 decode-r0 prefill-r1 decode-r1; do
  printf '{"name":"%s","role":"%s","model":"%s",%s}\n' "$name" "${name%-*}" "$model" "$pace"
done | paste -sd, | sed 's/.*/[&]/' >"$run/engines.json"
spawn "$run/engines.log" "$target/debug/pd-engine-sim" --spec "$run/engines.json"
for _ in $(seq 100); do
  grep -q '"ready":true' "$run/engines.log" && break
  sleep 0.1
done
grep -q '"ready":true' "$run/engines.log" || { tail "$run/engines.log" >&2; die "the engines did not start"; }

# The pods as `kubectl get pods -o json` would show them.
pods_file=$run/pods.json
items=
for name in prefill-r0 decode-r0 prefill-r1 decode-r1; do
  port=$(grep "\"name\":\"$name\"" "$run/engines.log" | sed -E 's/.*"address":"[^"]*:([0-9]+)".*/\1/')
  items+="${items:+,}
  {\"apiVersion\": \"v1\", \"kind\": \"Pod\",
   \"metadata\": {\"name\": \"$name\", \"namespace\": \"demo\", \"uid\": \"$name-$port\",
    \"labels\": {\"model.aibrix.ai/name\": \"$model\", \"model.aibrix.ai/port\": \"$port\",
     \"model.aibrix.ai/engine\": \"vllm\", \"role-name\": \"${name%-*}\", \"roleset-name\": \"${name#*-}\"}},
   \"status\": {\"phase\": \"Running\", \"podIP\": \"127.0.0.1\",
    \"conditions\": [{\"type\": \"Ready\", \"status\": \"True\"}]}}"
done
printf '{"apiVersion": "v1", "kind": "List", "items": [%s\n]}\n' "$items" >"$pods_file"

data_port=$(free_port) control_port=$(free_port) admin_port=$(free_port) agent_port=$(free_port)
concurrency=2 plugin_config='{"allowExplain": true}'
start_gateway

sent=0 good=0
field() { sed -n "s/^$1: *//Ip" "$run/head" | tr -d '\r' | head -1; }

# try NAME STATUS PATH BODY [HEADER]...: sends a request and shows what happened. Without a body
# it is a GET.
try() {
  local name=$1 status=$2 path=$3 body=$4 times code ok=yes text header why
  shift 4
  local arguments=(-sS -N -D "$run/head" -o "$run/body" --max-time 60
    -w '%{http_code} %{time_starttransfer} %{time_total}'
    -H 'x-pd-explain: true' "http://127.0.0.1:$data_port$path")
  [[ -z $body ]] || arguments+=(-H 'content-type: application/json' --data-binary "$body")
  for header in "$@"; do arguments+=(-H "$header"); done
  sent=$((sent + 1))
  times=$(curl "${arguments[@]}") || ok=no
  read -r code first total <<<"$times"
  text=$(<"$run/body")
  [[ $code == "$status" ]] || ok=no
  if [[ $code == 200 && -n $body ]]; then
    [[ -n $(field prefill-target-pod) && -n $(field target-pod) ]] || ok=no
    # The simulated engine says whose KV it used: it must be that of this very prompt.
    [[ $text =~ prompt=([0-9a-f]+)\ kv=([0-9a-f]+) && ${BASH_REMATCH[1]} == "${BASH_REMATCH[2]}" ]] || ok=no
    [[ $body != *'"stream":true'* || $text == *'data: [DONE]'* ]] || ok=no
  fi
  printf '%-34s %s  first byte %4.0f ms, total %4.0f ms' "$name" "$code" "${first/./}e-3" "${total/./}e-3"
  if [[ -n $(field target-pod) ]]; then
    printf '  prefill %s -> decode %s' "$(field prefill-target-pod)" "$(field target-pod)"
  fi
  echo
  why=$(field x-pd-decision)
  [[ -z $why ]] || echo "    why: $why"
  if [[ $ok == yes ]]; then good=$((good + 1)); else echo "    NOT AS IT MUST BE: $text"; fi
}

chat() { printf '{"model":"%s","messages":[{"role":"user","content":"%s"}],"stream":%s}' "$model" "$1" "$2"; }
long=$(printf 'All work and no play makes Jack a dull boy. %.0s' $(seq 200))

echo
try "chat" 200 /v1/chat/completions "$(chat 'Why is the sky blue?' false)"
try "chat, streamed" 200 /v1/chat/completions "$(chat 'Why is the sky blue?' true)"
try "another prompt, streamed" 200 /v1/chat/completions "$(chat 'Write a haiku about routers.' true)"
try "long prompt" 200 /v1/chat/completions "$(chat "$long" false)"
try "long prompt again: its prefix is known" 200 /v1/chat/completions "$(chat "$long And then?" true)"
try "completion" 200 /v1/completions "{\"model\":\"$model\",\"prompt\":\"Once upon a time\",\"max_tokens\":5}"
try "forged target header" 200 /v1/chat/completions "$(chat 'Hello' false)" 'target-pod: 192.0.2.1:80'
try "models" 200 /v1/models ""
try "unknown model" 404 /v1/chat/completions '{"model":"no-such-model","messages":[]}'
echo

if [[ -z $once ]]; then
  say "up until Ctrl-C; try:"
  echo "  curl -N http://127.0.0.1:$data_port/v1/chat/completions -H 'content-type: application/json' \\"
  echo "    -H 'x-pd-explain: true' -i -d '$(chat 'Hello' true)'"
  say "metrics http://127.0.0.1:$admin_port/stats/prometheus, ledgers http://127.0.0.1:$control_port/pd/v1/ledgers"
fi
echo "demo: $good of $sent requests ok"
[[ $good -eq $sent ]] || exit 1
[[ -n $once ]] || stay
