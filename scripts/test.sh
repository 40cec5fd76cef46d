#!/usr/bin/env bash
# Everything that must hold before a change goes in: lint, types, tests. Installs what it needs.
#
#   scripts/test.sh                         all of it
#   scripts/test.sh tests/unit -k stops     arguments go to pytest
#
# See environment.sh for settings.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

command -v openssl >/dev/null || die "the tests make certificates with openssl; install it"

use_environment dev

say "fetching the demo model (once)"
"$VENV/bin/python" -c '
from service.models import resolve_model
print(resolve_model("smollm2-135m-instruct").path)' >&2

# The example client in JavaScript is tested where Node.js is at hand.
if command -v npm >/dev/null; then
  for package in examples/*/package.json; do
    folder="$(dirname "$package")"
    if [[ -f "$package" && ! -d "$folder/node_modules" ]]; then
      say "installing the packages of $folder (once)"
      (cd "$folder" && npm install --no-audit --no-fund --loglevel=error) ||
        die "npm could not install the packages of $folder"
    fi
  done
fi

say "ruff"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
say "mypy"
"$VENV/bin/mypy"
say "pytest"
exec "$VENV/bin/python" -m pytest "$@"
