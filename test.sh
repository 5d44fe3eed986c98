#!/usr/bin/env bash
# Runs every check: style, types, tests with the real frameworks as judges.
#
#   ./test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")"

venv=$(./setup.sh --peers)
export PATH="$venv/bin:$PATH"
ruff check .
ruff format --check .
mypy reshard converters
exec python -m pytest "$@"
