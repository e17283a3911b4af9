#!/usr/bin/env bash
# Install a wheel into fresh environments of every Python that is here, 3.11 to 3.14: base, then
# [serve].  A run and a server must answer where PATH has no program, so no compiler and no linker.
#
#     tools/deploy/try_wheel.sh WHEEL
set -euo pipefail
wheel="$(realpath "$1")"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

find_python() {
    local found
    for found in "$(command -v "python3.$1" || true)" "$HOME/.pyenv/versions/3.$1."*/bin/python; do
        if [ -x "$found" ] && "$found" -c 'import ensurepip' 2>/dev/null; then
            echo "$found"
            return
        fi
    done
}

# pi2 with nothing of this machine but Python.  No function: a job of one is its shell, not pi2.
start=(env -i HOME="$scratch" PATH=/nonexistent "$scratch/env/bin/python" -m pi2)

ask() { # whether the server that writes `log` is healthy
    local address
    address="$(sed -n 's|.* on \(http://.*\)|\1|p' log)"
    "$scratch/env/bin/python" -c \
        "import urllib.request as w; w.urlopen('$address/health')" 2>/dev/null
}

for minor in 11 12 13 14; do
    python="$(find_python "$minor")"
    if [ -z "$python" ]; then
        echo "Python 3.$minor: not here"
        continue
    fi
    rm -rf env .cache
    "$python" -m venv env
    env/bin/pip install --quiet "$wheel"
    env/bin/pip check >/dev/null
    "${start[@]}" run demo --prompt 'def ' --max-tokens 8 >text 2>errors || { cat errors; exit 1; }
    test -s text
    env/bin/pip install --quiet "$wheel[serve]"
    env/bin/pip check >/dev/null
    "${start[@]}" serve demo --port 0 >log 2>&1 &
    server=$!
    for _ in $(seq 240); do
        if ask; then break; fi
        sleep 0.5
    done
    ask || { cat log; kill "$server"; exit 1; }
    kill "$server"
    wait "$server" || true
    echo "Python 3.$minor: base and [serve] install, run and serve"
done
