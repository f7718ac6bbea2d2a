#!/usr/bin/env bash
# Usage: scripts/up.sh --pods-file FILE [--port P] [--control-port P] [--admin-port P]
#                      [--plugin-config FILE] [--concurrency N] [--tokenizer MODEL=FILE]...
#                      [--waiting-timeout SECONDS] [--agent-port P]
#
# Starts Envoy with the filter, and the agent, in front of engines that already run. FILE is a
# Kubernetes Pod List in YAML or JSON (`kubectl get pods -o json`), read again when it changes.
# Prints `ready` when requests can be sent to --port (default 10000) and stays until Ctrl-C, then
# stops both. --control-port (10001), --admin-port (9901) and --agent-port (its metrics; 9464 if that
# is free) are on loopback; --plugin-config is a JSON file of filter settings; --concurrency (2) is
# the number of Envoy workers; --tokenizer is a model's tokenizer.json, for exact prompt lengths
# (with the larger filter); --waiting-timeout (75) is how long Envoy lets a request wait for its
# prefill, longer than all tries together. The filter and the agent are built first, unless
# $PD_FILTER_WASM and $PD_AGENT name built ones.
set -euo pipefail
usage() { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }

pods_file= data_port=10000 control_port=10001 admin_port=9901 plugin_file= concurrency=2
waiting_timeout= agent_port= agent_options=()
while [[ $# -gt 0 ]]; do
  [[ $# -ge 2 ]] || usage
  case $1 in
    --pods-file) pods_file=$2 ;;
    --port) data_port=$2 ;;
    --control-port) control_port=$2 ;;
    --admin-port) admin_port=$2 ;;
    --plugin-config) plugin_file=$2 ;;
    --agent-port) agent_port=$2 ;;
    --concurrency) concurrency=$2 ;;
    --waiting-timeout) waiting_timeout=$2 ;;
    --tokenizer) agent_options+=(--tokenizer "$2") ;;
    *) usage ;;
  esac
  shift 2
done
[[ -n $pods_file ]] || usage
for number in "$data_port" "$control_port" "$admin_port" "$concurrency" \
  ${waiting_timeout:+"$waiting_timeout"} ${agent_port:+"$agent_port"}; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "up.sh: '$number' is not a number above 0" >&2; exit 2; }
done
for file in "$pods_file" ${plugin_file:+"$plugin_file"}; do
  [[ -r $file ]] || { echo "up.sh: cannot read $file" >&2; exit 2; }
done
pods_file=$(realpath "$pods_file")
plugin_config={}
[[ -z $plugin_file ]] || plugin_config=$(<"$plugin_file")

cd "$(dirname "$0")/.."
run=$(mktemp -d)
. scripts/gateway.sh

require_tools
for port in "$data_port" "$control_port" "$admin_port" ${agent_port:+"$agent_port"}; do
  if is_taken "$port"; then die "port $port is taken; choose another"; fi
done
envoy=$(scripts/envoy.sh)
target=${CARGO_TARGET_DIR:-target}
wasm=${PD_FILTER_WASM:-} agent=${PD_AGENT:-}
if [[ -z $wasm ]]; then
  say "building the filter (the first time takes some minutes)"
  if [[ ${#agent_options[@]} -gt 0 ]]; then
    scripts/build-wasm.sh --variant tokenizers
    wasm=$target/wasm32-wasip1/release/pd_filter_tokenizers.wasm
  else
    scripts/build-wasm.sh
    wasm=$target/wasm32-wasip1/release/pd_filter.wasm
  fi
fi
if [[ -z $agent ]]; then
  say "building the agent (the first time takes some minutes)"
  cargo build --release --locked -p pd-agent
  agent=$target/release/pd-agent
fi
if [[ -z $agent_port ]]; then
  agent_port=9464
  if is_taken $agent_port; then agent_port=$(free_port); fi
fi
say "logs in $run until it stops"
start_gateway
say "data http://127.0.0.1:$data_port, control :$control_port, Envoy admin :$admin_port, agent :$agent_port"
echo ready
stay
