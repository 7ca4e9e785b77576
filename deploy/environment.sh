#!/bin/sh
# Headrace's own virtual environment, for work on it and for the demo: environment.sh DIRECTORY
set -eu

venv=$1

usable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

python=
for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
    if usable "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    echo "expected Python 3.11 or 3.12, found $(python3 --version 2>&1 || true); name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # Debian and Ubuntu ship venv apart from Python.
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq "$package" >/dev/null
    else
        echo "expected Python's venv module; install it: sudo apt-get install $package" >&2
        exit 1
    fi
fi

echo "installing Headrace into $venv ($("$python" --version))"
rm -f "$venv/.installed"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
touch "$venv/.installed"
