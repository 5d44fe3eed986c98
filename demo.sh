#!/usr/bin/env bash
# Converts a checkpoint that real Megatron wrote at TP4 PP2 to TP2 PP4, and shows that nothing changed.
set -euo pipefail
cd "$(dirname "$0")"

venv=$(./setup.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run() {
  printf '\n$ %s\n' "$*"
  "$venv/bin/$1" "${@:2}"
}

"$venv/bin/python" -m tarfile --filter data -e fixtures/megatron/a-tp4pp2.tar.xz "$work"
cd "$work"
run reshard inspect a-tp4pp2/dist
run reshard convert a-tp4pp2/dist converted --to tp2pp4
run reshard inspect converted
run reshard verify converted --against a-tp4pp2/dist
printf '\nverified: every tensor, moment and step of converted/ equals its source, bit for bit\n'
