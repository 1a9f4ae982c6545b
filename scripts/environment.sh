# Makes .venv in the project's root, once. Sourced by scripts/check and scripts/test.
# A finished environment has the stamp .venv/.ready; without it the install is run (again).
# set SUMGRAD_PYTHON to use another interpreter than python3.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if [ ! -e .venv/.ready ]; then
  python=${SUMGRAD_PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "sumgrad needs Python 3.11 or newer; set SUMGRAD_PYTHON" >&2
    exit 2
  }
  echo "making .venv (once)" >&2
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --upgrade pip
  .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
  touch .venv/.ready
fi
