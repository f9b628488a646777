#!/usr/bin/env bash
# Regenerates proto/loraplex_proto/v1/*_pb2*, with --check only compares. Generated code refuses to import under a grpcio
# older than its generator, so the generator is the lowest supported grpcio-tools, in an environment of its own (it wants
# an older protobuf than the project runs with).
set -euo pipefail
cd "$(dirname "$0")/.."
tools=1.76.0
env=.venv-proto
if [ ! -x $env/bin/python ] || [ "$(cat $env/.tools 2>/dev/null)" != $tools ]; then
  "${PYTHON:-python3}" -m venv $env
  $env/bin/python -m pip install -q grpcio-tools==$tools mypy-protobuf==3.7.0
  echo $tools >$env/.tools
fi
out=proto
if [ "${1:-}" = --check ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
PATH=$PWD/$env/bin:$PATH $env/bin/python -m grpc_tools.protoc -Iproto \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  proto/loraplex_proto/v1/*.proto
if [ "$out" != proto ]; then
  for f in proto/loraplex_proto/v1/*_pb2*; do
    diff -u "$f" "$out/loraplex_proto/v1/${f##*/}" || { echo "generated code is stale: run 'make proto'" >&2; exit 1; }
  done
  echo "generated code is up to date"
fi
