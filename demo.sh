#!/usr/bin/env bash
# Converts a checkpoint that real Megatron wrote at TP4 PP2 to TP2 PP4, then compares the result with
# what Megatron wrote itself when it loaded the same state at TP2 PP4.
set -euo pipefail
cd "$(dirname "$0")"

venv=$(./setup.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run() {
  printf '\n$ %s\n' "$*"
  "$venv/bin/$1" "${@:2}"
}

"$venv/bin/python" -m tarfile --filter data -e fixtures/megatron/a.tar.xz "$work"
cd "$work"
run reshard inspect a-tp4pp2/dist
run reshard convert a-tp4pp2/dist converted --to tp2pp4
run reshard inspect converted
run reshard verify converted --against a-tp2pp4/dist
