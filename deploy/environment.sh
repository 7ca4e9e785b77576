#!/bin/sh
# Headrace's own virtual environment, for work on it and for the demo: environment.sh DIRECTORY
# What the tests need beside it, and the demo does not: environment.sh redis, environment.sh nginx
# What Debian and Ubuntu ship apart from Python is installed where we may, and named where we may not.
set -eu

venv=$1

usable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

# need PACKAGE WHAT: installs a system package, or says that WHAT is missing and how to get it.
need() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing $1 ($2)"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1" >/dev/null
    else
        echo "expected $2; install it: sudo apt-get install $1" >&2
        exit 1
    fi
}

if [ "$venv" = redis ]; then
    # The program is in redis-tools, under a second name; the package redis-server would add a service to the system.
    command -v redis-server >/dev/null || command -v redis-check-rdb >/dev/null || need redis-tools "redis-server"
    exit
fi

if [ "$venv" = nginx ]; then
    command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] && exit
    # Debian's way of saying that a package's service is not to be started: ours would take port 80.
    policy=/usr/sbin/policy-rc.d
    if [ "$(id -u)" = 0 ] && [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    need nginx-light nginx
    exit
fi

python=
for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
    if usable "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    found=$(python3 --version 2>&1) || found="none"
    echo "expected Python 3.11 or 3.12, found $found; name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')

"$python" -c 'import ensurepip, venv' 2>/dev/null || need "$version-venv" "Python's venv module"
# Triton's Python stub is linked with it.
"$python" - 2>/dev/null <<'PY' || need "lib$version" "Python's shared library"
import ctypes, pathlib, sys, sysconfig
name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
beside = pathlib.Path(sysconfig.get_config_var("LIBDIR") or "/") / name
ctypes.CDLL(str(beside) if beside.exists() else name)
PY

echo "installing Headrace into $venv ($("$python" --version))"
rm -f "$venv/.installed"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
touch "$venv/.installed"
