# Sourced by up.sh and demo.sh: starts Envoy and the agent on loopback, and stops by process id
# whatever was started, however the script ends.
#
# Uses: run (folder for files of this run), envoy, agent, wasm (paths), data_port, control_port,
# admin_port, agent_port (numbers), concurrency, plugin_config (JSON text), pods_file, and
# waiting_timeout (seconds) where it is set.

started=() names=()

# Stops everything, newest first.
stop_all() {
  local code=$? at
  trap - EXIT INT TERM
  for ((at = ${#started[@]} - 1; at >= 0; at--)); do
    kill "${started[at]}" 2>/dev/null || true
  done
  for at in "${!started[@]}"; do
    # A process that does not listen to TERM within 5 s is killed.
    for _ in $(seq 50); do
      kill -0 "${started[at]}" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "${started[at]}" 2>/dev/null || true
    wait "${started[at]}" 2>/dev/null || true
  done
  if [[ $code -ne 0 && $code -ne 130 && $code -ne 143 && ${#started[@]} -gt 0 ]]; then
    echo "$(basename "$0"): logs are kept in $run" >&2
  else
    rm -rf "$run"
  fi
  exit "$code"
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# spawn LOG COMMAND...: starts a process that stop_all ends.
spawn() {
  local log=$1
  shift
  # A session of its own: Ctrl-C reaches this script, which then stops things in order.
  setsid "$@" >>"$log" 2>&1 </dev/null &
  started+=($!)
  names+=("$(basename "$log" .log)")
}

say() { echo "$(basename "$0"): $*"; }
die() { echo "$(basename "$0"): $*" >&2; exit 1; }

is_taken() { (: </dev/tcp/127.0.0.1/"$1") 2>/dev/null; }

# A port nothing listens on, below the range the kernel hands out by itself.
free_port() {
  local port
  for _ in $(seq 200); do
    port=$((RANDOM % 12000 + 20000))
    is_taken "$port" || { echo "$port"; return; }
  done
  die "no free port found"
}

# wait_for SECONDS WHAT URL PID LOG: until URL answers 200 while PID lives.
wait_for() {
  local seconds=$1 what=$2 url=$3 pid=$4 log=$5
  for _ in $(seq $((seconds * 10))); do
    curl -sf -o /dev/null --max-time 2 "$url" && return
    if ! kill -0 "$pid" 2>/dev/null; then
      tail -n 20 "$log" >&2
      die "$what ended"
    fi
    sleep 0.1
  done
  tail -n 20 "$log" >&2
  die "$what did not come up within $seconds s"
}

# What building and running need, installed where it is missing.
require_tools() {
  local tool
  for tool in cargo curl; do
    command -v "$tool" >/dev/null || die "$tool is missing; install it first (cargo: https://rustup.rs)"
  done
  if command -v rustup >/dev/null && ! rustup target list --installed | grep -qx wasm32-wasip1; then
    say "installing the wasm32-wasip1 target"
    rustup target add wasm32-wasip1
  fi
}

# Starts Envoy, then the agent, and returns when the gateway can serve.
start_gateway() {
  local version buffer=1048576
  version=$("$envoy" --version | grep -oE '/[0-9]+\.[0-9]+\.[0-9]+' | head -1 | tr -d /)
  # Envoys before 1.40 take the body limit from the listener's buffer.
  if [[ $(printf '%s\n' 1.40.0 "$version" | sort -V | head -1) != 1.40.0 ]]; then buffer=67108864; fi
  scripts/render-envoy.sh envoy/standalone/envoy.yaml \
    "ADMIN_PORT=$admin_port" "LISTENERS=$run/listeners.yaml" >"$run/envoy.yaml"
  scripts/render-envoy.sh envoy/standalone/listeners.yaml \
    "DATA_PORT=$data_port" "CONTROL_PORT=$control_port" "DATA_BUFFER_BYTES=$buffer" \
    "WASM=$wasm" "PLUGIN_CONFIG=$plugin_config" \
    ${waiting_timeout:+"WAITING_TIMEOUT=${waiting_timeout}s"} >"$run/listeners.yaml"
  say "starting Envoy $version with $concurrency workers"
  spawn "$run/envoy.log" "$envoy" -c "$run/envoy.yaml" --concurrency "$concurrency" \
    --disable-hot-restart --log-format-escaped
  local envoy_pid=${started[-1]}
  wait_for 30 "Envoy" "http://127.0.0.1:$admin_port/ready" "$envoy_pid" "$run/envoy.log"
  local stats
  stats=$(curl -s "http://127.0.0.1:$admin_port/stats?filter=lds.update_rejected")
  if [[ $stats == *": "[1-9]* ]]; then
    # Envoy says it more than once.
    grep -E '\[(error|critical|warning)\]' "$run/envoy.log" | sed 's/^\[[^]]*\]//' | awk '!seen[$0]++' | tail -n 40 >&2
    die "Envoy refused the configuration"
  fi
  say "starting the agent"
  spawn "$run/agent.log" "$agent" --pods-file "$pods_file" --envoy "http://127.0.0.1:$control_port" \
    --listen "127.0.0.1:$agent_port" ${agent_options[@]+"${agent_options[@]}"}
  wait_for 30 "the agent" "http://127.0.0.1:$agent_port/readyz" "${started[-1]}" "$run/agent.log"
  wait_for 30 "the gateway" "http://127.0.0.1:$data_port/readyz" "$envoy_pid" "$run/envoy.log"
}

# Stays until a process ends by itself or the script is stopped.
stay() {
  local ended at
  wait -n -p ended "${started[@]}" || true
  for at in "${!started[@]}"; do
    [[ ${started[at]} != "$ended" ]] || die "${names[at]} ended by itself"
  done
  die "a process ended by itself"
}
