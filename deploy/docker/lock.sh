#!/usr/bin/env bash
# Writes the lock files of the container images from setup.cfg: exact versions with hashes, for Python 3.11 and later on every
# platform. Needs uv (pip install uv). Versions that are locked stay as they are unless --upgrade or --upgrade-package NAME is given.
set -euo pipefail
cd "$(dirname "$0")/../.."
locks=deploy/docker/locks
options=(--quiet --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command deploy/docker/lock.sh)

# Every target can read from stores and send traces.
uv pip compile "${options[@]}" "$@" --constraints $locks/constraints.txt --extra gcs --extra s3 --extra otel setup.cfg -o $locks/base.txt
echo 'setuptools>=77' | uv pip compile "${options[@]}" "$@" - -o $locks/build.txt

# A target adds to what all share, so its file leaves that out.
mapfile -t shared < <(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package=\1/p' $locks/base.txt | sort -u)
uv pip compile "${options[@]}" "$@" "${shared[@]}" --constraints $locks/base.txt --extra cuda13 setup.cfg -o $locks/cuda.txt
uv pip compile "${options[@]}" "$@" "${shared[@]}" --constraints $locks/base.txt --extra cuda12 setup.cfg -o $locks/cuda12.txt
uv pip compile "${options[@]}" "$@" "${shared[@]}" --constraints $locks/base.txt --extra tpu setup.cfg -o $locks/tpu.txt
