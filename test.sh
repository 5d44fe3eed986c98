#!/usr/bin/env bash
# Runs every check: style, types, tests with the real frameworks as judges.
#
#   ./test.sh [pytest arguments]     -n 0: in one process, as debuggers want it
set -euo pipefail
cd "$(dirname "$0")"

venv=$(./setup.sh --peers)
export PATH="$venv/bin:$PATH"
ruff check .
ruff format --check .
mypy reshard converters
# a file of tests stays in one process: what is costly is made once a file
exec python -m pytest -n logical --maxprocesses 4 --dist loadfile "$@"
