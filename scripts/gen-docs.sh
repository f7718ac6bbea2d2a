#!/usr/bin/env bash
# Prints the generated documentation of the settings, each block between its markers:
#   <!-- knobs:begin --> … <!-- knobs:end -->                  the table, Markdown
#   # host-env-keys:begin … # host-env-keys:end                the variables an Envoy vm_config
#                                                              hands to the filter, YAML
#
#   scripts/gen-docs.sh                 print both
#   scripts/gen-docs.sh --check FILE…   compare the blocks in FILEs; exit 1 when one is stale
#   scripts/gen-docs.sh --write FILE…   put the blocks into FILEs
#
# In a FILE a block may be indented: generated lines take the indentation of the begin marker.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

# From the workspace, so that its toolchain file applies.
generate() { (cd "$root" && cargo run --quiet --locked -p pd-wire --example knob_table -- "$1"); }

knobs_begin='<!-- knobs:begin -->' knobs_end='<!-- knobs:end -->'
keys_begin='# host-env-keys:begin' keys_end='# host-env-keys:end'

# Copies stdin; what stands between the markers $1 and $2 becomes $3.
# Fails with 3 when there is no such block, with 4 when one does not end.
splice() {
    BLOCK=$3 awk -v begin="$1" -v end="$2" '
        function text(line) { sub(/^[ \t]+/, "", line); sub(/[ \t\r]+$/, "", line); return line }
        inside && text($0) == end { inside = 0 }
        !inside { print }
        !inside && text($0) == begin {
            match($0, /^[ \t]*/)
            indent = substr($0, 1, RLENGTH)
            count = split(ENVIRON["BLOCK"], lines, "\n")
            for (i = 1; i <= count; i++) print (lines[i] == "" ? "" : indent lines[i])
            inside = 1
            blocks++
        }
        END { exit inside ? 4 : blocks ? 0 : 3 }'
}

mode=${1:-print}
case $mode in
print | --check | --write) ;;
*) usage ;;
esac

table=$(generate markdown)
keys=$(generate env-keys)

if [ "$mode" = print ]; then
    printf '%s\n' "$knobs_begin" "$table" "$knobs_end" '' "$keys_begin" "$keys" "$keys_end"
    exit 0
fi
shift
[ $# -gt 0 ] || usage

fresh=$(mktemp)
trap 'rm -f "$fresh" "$fresh.next"' EXIT
stale=0
for file in "$@"; do
    cp -- "$file" "$fresh"
    found=0
    for block in knobs keys; do
        begin=${block}_begin end=${block}_end
        if [ "$block" = knobs ]; then body=$table; else body=$keys; fi
        code=0
        splice "${!begin}" "${!end}" "$body" <"$fresh" >"$fresh.next" || code=$?
        case $code in
        0) mv "$fresh.next" "$fresh" && found=1 ;;
        3) ;;
        *)
            echo "gen-docs: $file: '${!begin}' without '${!end}'" >&2
            exit 2
            ;;
        esac
    done
    if [ $found = 0 ]; then
        echo "gen-docs: $file has no generated block ('$knobs_begin' or '$keys_begin')" >&2
        exit 2
    fi
    if ! cmp -s -- "$file" "$fresh"; then
        if [ "$mode" = --write ]; then
            cat "$fresh" >"$file"
        else
            diff -u --label "$file" --label "$file, generated" -- "$file" "$fresh" >&2 || true
            echo "gen-docs: $file is stale; run scripts/gen-docs.sh --write $file" >&2
            stale=1
        fi
    fi
done
exit $stale
