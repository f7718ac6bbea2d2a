#!/usr/bin/env bash
# Usage: scripts/render-envoy.sh TEMPLATE NAME=VALUE... > FILE
#
# Replaces the value of every "key: value # @NAME" line of TEMPLATE by VALUE. Values that YAML
# could read as something else are written as quoted strings. Fails when TEMPLATE has no line for
# a NAME, so that a misspelt one does not pass unseen.
set -euo pipefail
[[ $# -ge 1 ]] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
template=$1
shift

text=$(<"$template")
for pair in "$@"; do
  name=${pair%%=*} value=${pair#*=}
  [[ $pair == *=* && $name =~ ^[A-Z_]+$ ]] || { echo "render-envoy: '$pair' is not NAME=VALUE" >&2; exit 2; }
  grep -q "# @$name\$" <<<"$text" || { echo "render-envoy: $template has no line marked @$name" >&2; exit 2; }
  if [[ ! $value =~ ^([0-9]+[a-z]*|true|false)$ ]]; then
    value=${value//$'\n'/ }
    value="'${value//\'/\'\'}'"
  fi
  text=$(NAME=$name VALUE=$value awk '
    { mark = "# @" ENVIRON["NAME"]
      if (length($0) > length(mark) && substr($0, length($0) - length(mark) + 1) == mark) {
        match($0, /^[^:]*: /)
        print substr($0, 1, RLENGTH) ENVIRON["VALUE"] " " mark
      } else print }' <<<"$text")
done
printf '%s\n' "$text"
