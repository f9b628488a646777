#!/usr/bin/env bash
# Builds the three images with buildah (no Docker engine needed) and smoke-tests them: who runs, what is in them, whether they
# answer and stop. As root on a Debian machine with buildah and debootstrap:
#
#   docker/smoke.sh [WORK_DIR]
#
# Base images are stood in for by a debootstrapped tree, torch by its CPU build (TORCH), so nothing is pulled. pip's settings
# in the environment (PIP_*) and the local folders that they name are carried into the build.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-$(mktemp -d)}
torch=${TORCH:-$(grep '^torch==' constraints.txt)}
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
slim=docker.io/library/debian:bookworm-slim
cuda=docker.io/library/cuda-stand-in:latest
mkdir -p "$work"

carried=()
while IFS='=' read -r name value; do
  carried+=(--env "$name=$value")
  if [ -e "$value" ]; then carried+=(--volume "$value:$value:ro"); fi
done < <(env | grep '^PIP_' || true)
[ ! -e /etc/pip.conf ] || carried+=(--volume /etc/pip.conf:/etc/pip.conf:ro)
for folder in $(grep -hos 'file://[^ ]*' /etc/pip.conf | sed 's,file://,,' || true); do
  [ ! -d "$folder" ] || carried+=(--volume "$folder:$folder:ro")
done

if ! buildah images "$slim" >/dev/null 2>&1; then
  echo "== base tree"
  [ -d "$work/tree/usr" ] || debootstrap --variant=minbase \
    --include=ca-certificates,gcc,libc6-dev,python3,python3-dev,python3-venv bookworm "$work/tree" >"$work/debootstrap.log"
  for name in "$slim" "$cuda"; do
    c=$(buildah from scratch)
    buildah add -q "$c" "$work/tree" /
    buildah commit -q "$c" "$name"
    buildah rm "$c" >/dev/null
  done
fi

for target in router worker all; do
  echo "== build $target"
  buildah bud --layers --pull-never --target "$target" --build-arg "SLIM_BASE=$slim" --build-arg "CUDA_BASE=$cuda" \
    --build-arg "TORCH=$torch" "${carried[@]}" -t "loraplex-$target" -f docker/Dockerfile . >"$work/build-$target.log" 2>&1 ||
    { tail -40 "$work/build-$target.log" >&2; exit 1; }
done

# `in_image IMAGE COMMAND...` runs as the image's own user and prints what the command prints.
in_image() {
  local c status=0
  c=$(buildah from --pull-never "localhost/loraplex-$1")
  buildah run "$c" -- "${@:2}" || status=$?
  buildah rm "$c" >/dev/null
  return $status
}

expect() { # expect WHAT COMMAND...
  if "${@:2}" >"$work/out" 2>&1; then echo "ok   $1"; else echo "FAIL $1"; tail -20 "$work/out"; exit 1; fi
}

echo "== test"
for target in router worker all; do
  expect "$target: not root" in_image "$target" python -c 'import os; assert os.getuid() == 10001, os.getuid()'
  expect "$target: the command answers" in_image "$target" loraplex --help
  config=$(buildah inspect --type image "localhost/loraplex-$target")
  expect "$target: has a health check" grep -q healthcheck <<<"$config"
  expect "$target: entry point" grep -q '"loraplex"' <<<"$config"
done
expect "router: no torch in the image" in_image router python -c 'import importlib.util as u; assert u.find_spec("torch") is None'
expect "worker: a missing model is one sentence" in_image worker sh -c \
  'loraplex worker /nowhere 2>err; s=$?; cat err; test $s = 1 && ! grep -q Traceback err'
expect "all: serves the demo and ends on SIGTERM" in_image all sh -c '
  world=$(python -c "from loraplex_server.demo.world import World; print(World.committed().path)")
  loraplex serve "$world/base" --adapters "$world/adapters" --port 50951 --drain 1 & pid=$!
  for i in $(seq 120); do python -m loraplex.cli.healthcheck 127.0.0.1:50951 && break; sleep 1; done
  loraplex adapters list --server 127.0.0.1:50951 && kill -TERM $pid && wait $pid'
echo "all images built and tested"
