#!/usr/bin/env bash
# Builds the three images with buildah (no Docker engine needed) and tests what a user relies on: they do not run as root, have
# a health check and an entry point, hold what they should, answer, serve, and end when told to. As root on Debian or Ubuntu with
# buildah, debootstrap and pip:
#
#   docker/smoke.sh [WORK_DIR]
#
# Nothing is pulled. A debootstrapped tree (WORK_DIR/tree, made if it is missing) stands in for both base images; SUITE names
# another than bookworm. torch is what constraints.txt names unless TORCH says otherwise: see to it that pip finds a CPU build.
# pip's settings on this machine hold inside too, with the local folders and the certificates that they name. With WORK_DIR the
# images stay in WORK_DIR/storage, and the next run builds only what changed.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
work=$(realpath "${1:-$(mktemp -d)}")
base=localhost/base-stand-in
export BUILDAH_ISOLATION=chroot
mkdir -p "$work/pip"

# Overlays where the kernel lets us mount them; else whole copies of the tree at every step, which is slow.
mkdir -p "$work"/probe/{lower,upper,work,merged}
options="lowerdir=$work/probe/lower,upperdir=$work/probe/upper,workdir=$work/probe/work"
if mount -t overlay overlay -o "$options" "$work/probe/merged" 2>/dev/null; then
  umount "$work/probe/merged"
  driver=overlay
else
  driver=vfs
fi
rm -rf "$work/probe"

# The storage is the work directory's own: images of the same name on this machine are neither used nor replaced.
b() { buildah --storage-driver "$driver" --root "$work/storage" --runroot "$work/run" "$@"; }

clean_up() {
  b rm --all >/dev/null 2>&1 || true
  [ "$keep" = yes ] || rm -rf "$work"
}
keep=$([ $# -ge 1 ] && echo yes || echo no)
trap clean_up EXIT

# Writes pip.conf into the folder $1 and prints the local folders that it names, one per line.
gather_pip_settings() {
  python3 -m pip config list | python3 -c '
import ast, os, pathlib, shutil, sys

folder = pathlib.Path(sys.argv[1])
settings, folders = {"global": {}}, set()
for line in sorted(sys.stdin, key=lambda line: line.startswith(":env:")):  # the environment outranks files
    key, _, value = line.strip().partition("=")
    section, _, name = key.rpartition(".")
    settings.setdefault("global" if section == ":env:" else section, {})[name] = ast.literal_eval(value)
bundles = [os.environ.get(name) for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")]
bundle = settings["global"].get("cert") or next(filter(None, bundles), None)
if bundle:
    shutil.copy(bundle, folder / "ca.pem")
    settings["global"]["cert"] = "/etc/xdg/pip/ca.pem"
for section in settings.values():
    for name in ("find-links", "index-url", "extra-index-url"):
        for place in section.get(name, "").split():
            path = pathlib.Path(place.removeprefix("file://"))
            if path.is_absolute() and path.is_dir():
                # The pages of a local index point to files beside the folder of pages.
                folders.add(path.parent if path.name == "simple" else path)
with open(folder / "pip.conf", "w") as file:
    for section, values in settings.items():
        file.write(f"[{section}]\n")
        file.writelines("{} = {}\n".format(name, value.replace("\n", "\n  ")) for name, value in values.items())
print(*sorted(folders), sep="\n")
' "$1"
}

mounts=(--volume "$work/pip:/etc/xdg/pip:ro")
while read -r folder; do
  [ -z "$folder" ] || mounts+=(--volume "$folder:$folder:ro")
done < <(gather_pip_settings "$work/pip")

if ! b inspect --type image "$base" >/dev/null 2>&1; then
  echo "== base"
  if [ ! -d "$work/tree/usr" ]; then
    debootstrap --variant=minbase --include=ca-certificates,g++,gcc,libc6-dev,python3,python3-dev,python3-venv,tini \
      "${SUITE:-bookworm}" "$work/tree" >"$work/debootstrap.log"
    rm -rf "$work"/tree/var/cache/apt/archives/*.deb "$work"/tree/var/lib/apt/lists/*
  fi
  container=$(b from scratch)
  b add -q "$container" "$work/tree" /
  b commit -q --rm "$container" "$base" >/dev/null
fi

for target in router worker all; do
  echo "== build $target"
  # Health checks are no part of the OCI format, which buildah writes unless told otherwise.
  b build --format docker --layers --pull-never --target "$target" --tag "localhost/loraplex-$target" \
    --build-arg "SLIM_BASE=$base" --build-arg "CUDA_BASE=$base" --build-arg "TORCH=${TORCH-}" "${mounts[@]}" \
    -f docker/Dockerfile . >"$work/build-$target.log" 2>&1 || {
    tail -40 "$work/build-$target.log" >&2
    exit 1
  }
done

expect() { # expect WHAT COMMAND...
  if "${@:2}" >"$work/out" 2>&1; then
    echo "ok   $1"
  else
    echo "FAIL $1"
    tail -20 "$work/out"
    exit 1
  fi
}

# In the image's container, as the image's user. The network is this machine's, so servers are told to stay on loopback.
run() { b run --volume "$repository/tests/support/world.py:/smoke/world.py:ro" "$container" -- "$@"; }

# `inside NAME ARGUMENTS...` runs a function of this script in there.
inside() { run bash -euc "$(declare -f start "$1"); \"\$@\"" bash "$@"; }

# Starts the server `$@` as the image does, on a free port; leaves $pid and $port.
start() {
  port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  # Here tini is not process 1, as it is in a container; it is told to adopt orphans all the same.
  TINI_SUBREAPER=1 tini -- loraplex "$@" --host 127.0.0.1 --port "$port" &
  pid=$!
  trap 'kill -TERM $pid 2>/dev/null || true' EXIT
}

describes_itself() {
  b inspect --type image "localhost/loraplex-$target" | python3 -c '
import json, sys
config = json.load(sys.stdin)["Docker"]["config"]
assert config["User"] == "10001:10001", config
assert config["Healthcheck"]["Test"][:4] == ["CMD", "python", "-m", "loraplex.cli.healthcheck"], config
assert config["Entrypoint"] == ["tini", "--", "loraplex"], config
assert not [name for name in config["Env"] if name.startswith("PIP_")], config'
}

is_not_root() {
  [ "$(id -u):$(id -g)" = 10001:10001 ]
  touch "$HOME/written"
  if touch /opt/loraplex/written; then return 1; fi
}

has_no_torch() {
  python -c 'from importlib.util import find_spec as f
assert f("grpc") and not f("torch") and not f("loraplex_server")'
}

follows_constraints() {
  python - "$@" <<'PYTHON'
import importlib.metadata, re, sys
pins = dict(line.split("==") for line in sys.argv[1].split())
pins = {re.sub("[-_.]+", "-", name).lower(): version for name, version in pins.items()}
installed = {re.sub("[-_.]+", "-", d.name).lower(): d.version for d in importlib.metadata.distributions()}
wrong = {name: version for name, version in installed.items() if pins.get(name, version) != version.partition("+")[0]}
loose = installed.keys() - pins.keys() - {"pip", "setuptools", "torch", "triton"}
loose = {name for name in loose if not name.startswith("loraplex")}
assert not wrong, f"other versions than constraints.txt: {wrong}"
assert not loose, f"not in constraints.txt: {sorted(loose)}"
PYTHON
}

has_native_kernels() {
  python -c '
import platform
from loraplex_server.backends.cpu.native.library import load
status = load().status
print(status)
assert status.usable or platform.machine() != "x86_64" or status.reason.startswith("this CPU has none"), status'
}

refuses_a_missing_model() {
  status=0
  loraplex worker /nowhere 2>err || status=$?
  cat err
  [ $status = 1 ] && grep -q '^error .*/nowhere' err && ! grep -q Traceback err
}

routes_nothing_and_stops() {
  start router --worker 127.0.0.1:1 --announce 0 --drain 5
  for _ in $(seq 60); do
    if python -m loraplex.cli.healthcheck "127.0.0.1:$port" ""; then break; fi
    sleep 0.5
  done
  python -m loraplex.cli.healthcheck "127.0.0.1:$port" ""                             # alive
  if python -m loraplex.cli.healthcheck "127.0.0.1:$port"; then return 1; fi # not ready: it has no worker
  kill -TERM $pid
  wait $pid
}

serves_and_stops() {
  cd /tmp
  PYTHONPATH=/smoke python -c 'import pathlib, world; world.make_world(pathlib.Path("world"))'
  start serve world/model --adapters world/adapters --threads 1 --drain 5
  for _ in $(seq 240); do
    if python -m loraplex.cli.healthcheck "127.0.0.1:$port"; then break; fi
    kill -0 $pid
    sleep 0.5
  done
  loraplex generate --server "127.0.0.1:$port" --max-tokens 8 --ignore-eos --json hello >base.json
  loraplex generate --server "127.0.0.1:$port" --max-tokens 8 --ignore-eos --json --adapter a000 hello >adapter.json
  if cmp base.json adapter.json; then return 1; fi
  loraplex adapters list --server "127.0.0.1:$port" | tee list
  grep -q a000 list
  kill -TERM $pid
  wait $pid
}

echo "== test"
for target in router worker all; do
  container=$(b from --pull-never "localhost/loraplex-$target")
  expect "$target: user, health check and entry point are the image's" describes_itself
  expect "$target: not root, and cannot change the program" inside is_not_root
  expect "$target: the command answers" run tini -- loraplex --help
  expect "$target: versions of constraints.txt" inside follows_constraints "$(grep '==' constraints.txt)"
  [ $target = router ] || expect "$target: the native CPU kernels load" inside has_native_kernels
  case $target in
  router)
    expect "router: no torch in the image" inside has_no_torch
    expect "router: alive without a worker, not ready, ends on SIGTERM" inside routes_nothing_and_stops
    ;;
  worker) expect "worker: a missing model is one sentence" inside refuses_a_missing_model ;;
  all) expect "all: serves a model with adapters, ends on SIGTERM" inside serves_and_stops ;;
  esac
  b rm "$container" >/dev/null
done
b images --format '{{.Name}} {{.Size}}'
echo "all images built and tested"
