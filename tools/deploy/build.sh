#!/usr/bin/env bash
# Build the image and ask a server in it, also where no registry can be reached: then the base is made
# of Debian's packages.  Needs root, buildah, and for that base debootstrap.
#
#     tools/deploy/build.sh [FOLDER]      FOLDER: where images are kept; /var/lib/containers otherwise
#
# MOUNTS: more options of `buildah build`, such as --volume /opt/wheels:/opt/wheels:ro.
set -euo pipefail
cd "$(dirname "$0")/../.."
base="$(awk '/^FROM/ { print $2; exit }' tools/deploy/Containerfile)"
version="$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER="${STORAGE_DRIVER:-vfs}"
tool=(buildah)
if [ $# -gt 0 ]; then tool+=(--root "$1/images" --runroot "$1/run"); fi

if ! "${tool[@]}" inspect --type image "$base" >/dev/null 2>&1 &&
    ! "${tool[@]}" pull --quiet "$base" 2>/dev/null; then
    scratch="$(mktemp -d)"
    trap 'rm -rf "$scratch"' EXIT
    debootstrap --variant=minbase --include=ca-certificates bookworm "$scratch/root" >/dev/null
    rm -rf "$scratch"/root/var/cache/apt/archives/*.deb
    tar -C "$scratch/root" -cf "$scratch/root.tar" .
    empty="$("${tool[@]}" from scratch)"
    "${tool[@]}" add --quiet "$empty" "$scratch/root.tar" / >/dev/null
    "${tool[@]}" commit --quiet --rm "$empty" "$base" >/dev/null
fi
# shellcheck disable=SC2086
"${tool[@]}" build --pull-never --format docker --file tools/deploy/Containerfile \
    --tag "pi2:$version" ${MOUNTS:-} .

container="$("${tool[@]}" from --pull-never "localhost/pi2:$version")"
"${tool[@]}" run "$container" -- sh -euc '
    test "$(id -u)" = 10001
    pi2 serve demo --port 8765 & server=$!
    for second in $(seq 120); do
        if python3 -c "import urllib.request as w; w.urlopen(\"http://127.0.0.1:8765/health\")" 2>/dev/null
        then
            echo "the server in the image answers"
            kill $server
            wait $server || true
            exit 0
        fi
        sleep 1
    done
    exit 1'
"${tool[@]}" rm "$container" >/dev/null
