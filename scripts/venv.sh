# Sourced by the other scripts: `venv EXTRA` makes .venv with pairmesh and that extra, once, and again whenever
# pyproject.toml or constraints.txt changed. Needs only a Python >= 3.11 with venv.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "pairmesh needs Python 3.11 or newer: none of python3, python3.11 .. python3.13 is; set PYTHON=/path/to/python" >&2
    return 1
}

venv() {
    local extra=$1 python wanted stamp
    stamp=".venv/.pairmesh-$extra"
    wanted=$(cat pyproject.toml constraints.txt | cksum)
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python) || return 1
    if [ ! -x .venv/bin/pip ]; then
        echo "making .venv with $python" >&2
        rm -rf .venv
        "$python" -m venv .venv || {
            echo "cannot make a virtual environment: on Debian and Ubuntu run 'apt-get install python3-venv'" >&2
            return 1
        }
    fi
    echo "installing pairmesh[$extra] into .venv" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$extra]" >&2 || {
        echo "pip could not install pairmesh[$extra]; is a package index reachable?" >&2
        return 1
    }
    echo "$wanted" >"$stamp"
}
