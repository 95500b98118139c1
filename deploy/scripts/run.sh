#!/usr/bin/env bash
# Serves from a container, with Docker or Podman:
#   deploy/scripts/run.sh                          the small default model on the CPU, at http://127.0.0.1:8000
#   deploy/scripts/run.sh cuda --model ORG/NAME    on an NVIDIA GPU; what follows the target goes to levserve
# The image levserve:TARGET is built if it is missing. Variables:
#   PORT, ADDRESS     where to listen: 8000 and 127.0.0.1
#   MODELS            a folder that the container sees as /models, read-only
#   IMAGE, ENGINE     the image to run, and docker or podman
# LEVSERVE_* and HF_TOKEN are handed on, and so is a file .env in the current folder.
set -euo pipefail

case ${1:-} in
    cpu | cpu-model | cuda | cuda12 | tpu) target=$1; shift ;;
    -* | '') target=cpu ;;
    *) echo "run.sh: unknown target '$1'; the targets are cpu, cpu-model, cuda, cuda12 and tpu" >&2; exit 2 ;;
esac
image=${IMAGE:-levserve:$target}
root=$(cd "$(dirname "$0")/../.." && pwd)

find_engine() {
    local name
    for name in docker podman; do
        command -v "$name" > /dev/null && { echo "$name"; return; }
    done
    echo "run.sh: neither docker nor podman is installed" >&2
    return 1
}
engine=${ENGINE:-$(find_engine)}

if ! "$engine" image inspect "$image" > /dev/null 2>&1; then
    build=(build -f "$root/deploy/docker/Dockerfile" --target "$target" -t "$image")
    [ "$engine" = docker ] || build+=(--format docker)  # OCI's own format has no health check
    "$engine" "${build[@]}" "$root"
fi

port=${PORT:-}
if [ -f .env ]; then
    options=(--env-file .env)
    port=${port:-$(sed -n 's/^PORT=//p' .env)}
fi
options+=(--rm --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --stop-timeout 50
    --publish "${ADDRESS:-127.0.0.1}:${port:-8000}:8000" --volume levserve-cache:/var/cache/levserve)
[ ! -t 0 ] || options+=(--interactive --tty)
[ -z "${MODELS:-}" ] || options+=(--volume "$(cd "$MODELS" && pwd):/models:ro")
for variable in $(compgen -e); do
    case $variable in LEVSERVE_* | HF_TOKEN) options+=(--env "$variable") ;; esac
done
options+=(--env LEVSERVE_HOST=0.0.0.0 --env LEVSERVE_PORT=8000)  # of the container, whatever is published
case $engine-$target in
    docker-cuda | docker-cuda12) options+=(--gpus all) ;;
    *-cuda | *-cuda12) options+=(--device nvidia.com/gpu=all) ;;
    *-tpu) options+=(--privileged) ;;  # which device files a TPU has depends on its generation
esac

exec "$engine" run "${options[@]}" "$image" "$@"
