#!/usr/bin/env bash
# Usage: scripts/bench.sh [--quick] [--soak N] [--no-build] [--json FILE]
#                         [--a-wasm FILE] [--b-wasm FILE] [--a-config FILE] [--b-config FILE]
#                         [-- OPTION...]
#
# Measures the gateway against two plain Envoy legs sent by hand, both in front of the same two
# prefill and two decode engines (simulated, no delay), in turn and paired: 7 repeats, with --quick
# 3 short ones. Prints Markdown tables, writes JSON (target/bench/floor.json).
#   --soak N           instead: N requests of up to 8 KB through each, and the memory they took
#   --b-wasm, --b-config  instead: compares two gateways, A and B, that differ in filter.wasm or
#                      in plugin configuration (JSON); what is not given is the built filter and {}
#   --no-build         takes the programs as they are in target/
#   -- OPTION...       goes to pd-bench, e.g. -- --sizes 200 --concurrency 32 --stream true
# Client, engines and Envoy share the machine: close what else runs, and trust ratios first.
set -euo pipefail
usage() { sed -n '2,16s/^# \{0,1\}//p' "$0" >&2; exit 2; }

mode=floor quick= build=yes json= soak= a_wasm= b_wasm= a_config= b_config= options=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --quick) quick=--quick; shift; continue ;;
    --no-build) build=; shift; continue ;;
    --) shift; options=("$@"); break ;;
  esac
  [[ $# -ge 2 ]] || usage
  case $1 in
    --soak) mode=soak soak=$2 ;;
    --json) json=$2 ;;
    --a-wasm) a_wasm=$2 ;;
    --b-wasm) mode=ab b_wasm=$2 ;;
    --a-config) a_config=$2 ;;
    --b-config) mode=ab b_config=$2 ;;
    *) usage ;;
  esac
  shift 2
done
for file in $a_wasm $b_wasm $a_config $b_config; do
  [[ -r $file ]] || { echo "bench.sh: cannot read $file" >&2; exit 2; }
done
[[ -z $json ]] || json=$(realpath -m "$json")
[[ -z $a_wasm ]] || a_wasm=$(realpath "$a_wasm")
[[ -z $b_wasm ]] || b_wasm=$(realpath "$b_wasm")
a_config=${a_config:+$(<"$a_config")} b_config=${b_config:+$(<"$b_config")}

cd "$(dirname "$0")/.."
run=$(mktemp -d)
. scripts/gateway.sh

# As in gateway.sh, but an Envoy's access log goes nowhere: at these rates it would fill the disk.
# Envoy formats and writes it all the same.
spawn() {
  local log=$1 out=$1
  shift
  [[ $1 != "$envoy" ]] || out=/dev/null
  setsid "$@" >>"$out" 2>>"$log" </dev/null &
  started+=($!)
}

require_tools
envoy=$(scripts/envoy.sh)
target=${CARGO_TARGET_DIR:-target}
if [[ -n $build ]]; then
  say "building (the first time takes some minutes)" >&2
  scripts/build-wasm.sh >&2
  cargo build --release --locked -p pd-agent -p pd-engine-sim -p pd-bench
fi
built=$target/wasm32-wasip1/release/pd_filter.wasm agent=$target/release/pd-agent
json=${json:-$target/bench/$mode.json}
mkdir -p "$(dirname "$json")"

# Engines: no delay, nothing remembered of what they were sent.
model=sim-model names=(prefill-r0 prefill-r1 decode-r0 decode-r1)
for name in "${names[@]}"; do
  printf '{"name":"%s","role":"%s","model":"%s","log_ring":0}\n' "$name" "${name%-*}" "$model"
done | paste -sd, | sed 's/.*/[&]/' >"$run/engines.json"
spawn "$run/engines.log" "$target/release/pd-engine-sim" --spec "$run/engines.json"
for _ in $(seq 100); do
  grep -q '"ready":true' "$run/engines.log" && break
  sleep 0.1
done
grep -q '"ready":true' "$run/engines.log" || { tail "$run/engines.log" >&2; die "the engines did not start"; }

declare -A port
items=
for name in "${names[@]}"; do
  port[$name]=$(grep "\"name\":\"$name\"" "$run/engines.log" | sed -E 's/.*"address":"[^"]*:([0-9]+)".*/\1/')
  items+="${items:+,}
  {\"apiVersion\": \"v1\", \"kind\": \"Pod\",
   \"metadata\": {\"name\": \"$name\", \"namespace\": \"bench\", \"uid\": \"$name\",
    \"labels\": {\"model.aibrix.ai/name\": \"$model\", \"model.aibrix.ai/port\": \"${port[$name]}\",
     \"model.aibrix.ai/engine\": \"vllm\",
     \"role-name\": \"${name%-*}\", \"roleset-name\": \"${name#*-}\"}},
   \"status\": {\"phase\": \"Running\", \"podIP\": \"127.0.0.1\",
    \"conditions\": [{\"type\": \"Ready\", \"status\": \"True\"}]}}"
done
pods_file=$run/pods.json concurrency=2
printf '{"apiVersion": "v1", "kind": "List", "items": [%s\n]}\n' "$items" >"$pods_file"

# gateway NAME WASM CONFIG: starts one, with files of its own; sets data_port, control_port, pid.
gateway() {
  local whole=$run before=${#started[@]}
  wasm=$2 plugin_config=$3 run=$run/$1
  data_port=$(free_port) control_port=$(free_port) admin_port=$(free_port) agent_port=$(free_port)
  mkdir "$run"
  start_gateway >&2
  run=$whole pid=${started[before]}
}

# Starts the plain Envoy; sets prefill_port, decode_port, plain_pid.
plain_envoy() {
  prefill_port=$(free_port) decode_port=$(free_port)
  local admin
  admin=$(free_port)
  scripts/render-envoy.sh tests/bench/plain-envoy.yaml "ADMIN_PORT=$admin" \
    "PREFILL_PORT=$prefill_port" "DECODE_PORT=$decode_port" \
    "PREFILL_FIRST=${port[prefill-r0]}" "PREFILL_SECOND=${port[prefill-r1]}" \
    "DECODE_FIRST=${port[decode-r0]}" "DECODE_SECOND=${port[decode-r1]}" >"$run/plain.yaml"
  say "starting plain Envoy with $concurrency workers" >&2
  spawn "$run/plain.log" "$envoy" -c "$run/plain.yaml" --concurrency "$concurrency" --disable-hot-restart
  plain_pid=${started[-1]}
  wait_for 30 "plain Envoy" "http://127.0.0.1:$admin/ready" "$plain_pid" "$run/plain.log"
}

if [[ $mode == ab ]]; then
  gateway a "${a_wasm:-$built}" "${a_config:-{\}}"
  arguments=(ab --a-url "127.0.0.1:$data_port" --a-pid "$pid")
  gateway b "${b_wasm:-$built}" "${b_config:-{\}}"
  arguments+=(--b-url "127.0.0.1:$data_port" --b-pid "$pid")
else
  plain_envoy
  gateway a "${a_wasm:-$built}" "${a_config:-{\}}"
  arguments=("$mode" --prefill-url "127.0.0.1:$prefill_port" --decode-url "127.0.0.1:$decode_port"
    --floor-pid "$plain_pid" --url "127.0.0.1:$data_port" --pid "$pid")
  [[ $mode != soak ]] || arguments+=(--control-url "127.0.0.1:$control_port" --requests "$soak" --workers "$concurrency")
fi
# A soak has one length.
[[ $mode == soak || -z $quick ]] || arguments+=("$quick")
# In the background, so that a signal to this script ends it at once.
"$target/release/pd-bench" "${arguments[@]}" --model "$model" --json "$json" "${options[@]}" &
started+=($!)
wait "${started[-1]}"
say "wrote $json" >&2
