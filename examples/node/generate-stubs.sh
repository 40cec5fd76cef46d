#!/usr/bin/env bash
# Makes the stubs in the folder named (generated/ by default) from ../../protos.
#
# Needs `npm ci`, and a protoc: the one in Python's grpcio-tools, which brings the google.rpc messages of
# error details along (pip install grpcio-tools googleapis-common-protos). PYTHON names another Python.
set -euo pipefail
cd "$(dirname "$0")"

out="${1:-generated}"
python="${PYTHON:-python3}"
common="$("$python" -c 'import google.rpc, os; print(os.path.dirname(os.path.dirname(google.rpc.__path__[0])))')"

mkdir -p "$out"
"$python" -m grpc_tools.protoc \
  -I ../../protos -I "$common" \
  --plugin=protoc-gen-es=node_modules/.bin/protoc-gen-es \
  --es_out="$out" --es_opt=target=js+dts,import_extension=js \
  slipstream/v1/inference.proto slipstream/v1/sampling.proto slipstream/v1/control.proto \
  google/rpc/status.proto google/rpc/error_details.proto
