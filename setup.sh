#!/usr/bin/env bash
# Makes the Python environment of this clone and prints its folder: the active one, else .venv here.
#
#   ./setup.sh           what the tool needs
#   ./setup.sh --peers   also the frameworks that judge it, and the tools of test.sh (1.4 GB)
#
# A second run does nothing until pyproject.toml or constraints.txt changes. $PYTHON names the
# interpreter of a new .venv (default python3).
set -euo pipefail
cd "$(dirname "$0")"

case "${1-}" in
  "") extra=base ;;
  --peers) extra=peers ;;
  *) echo "usage: ./setup.sh [--peers]" >&2; exit 2 ;;
esac
say() { echo "setup: $*" >&2; }

venv=${VIRTUAL_ENV-}
if [ ! -x "$venv/bin/python" ]; then
  venv=$PWD/.venv
  if [ ! -x "$venv/bin/python" ]; then
    say "making .venv"
    "${PYTHON:-python3}" -m venv "$venv" >&2
  fi
fi
python=$venv/bin/python
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  say "reshard needs Python 3.11 or newer; $python is $("$python" --version). Set PYTHON."
  exit 1
}

# One line per finished install; peers contain the base.
stamp=$venv/reshard-setup
wanted="$PWD $(cat pyproject.toml constraints.txt | cksum)"
if grep -qxF -e "peers $wanted" -e "$extra $wanted" "$stamp" 2>/dev/null; then
  echo "$venv"
  exit 0
fi

# --no-build-isolation: builds use the pinned setuptools, and DeepSpeed's build needs torch.
install() {
  "$python" -m pip install -qq --disable-pip-version-check --no-build-isolation -c constraints.txt "$@" >&2
}
say "installing reshard into $venv"
install setuptools wheel
if [ $extra = peers ]; then
  say "installing torch, DeepSpeed, Megatron-core, transformers, accelerate, Lightning (1.4 GB, minutes)"
  install torch numpy
  DS_BUILD_OPS=0 install -e '.[test]'
else
  install -e .
fi
echo "$extra $wanted" >"$stamp"
echo "$venv"
