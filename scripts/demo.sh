#!/usr/bin/env bash
# From nothing to a streamed answer: installs Slipstream, fetches the demo model, starts a server on a free
# loopback port, asks it something through gRPC, and stops it again.
#
#   scripts/demo.sh                  asks a question of its own
#   scripts/demo.sh "my prompt"      asks yours
#
# The first run takes half a minute to a minute, later ones seconds. See environment.sh for settings.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

MODEL="smollm2-135m-instruct"
PROMPT="${1:-Explain in three sentences why the sky is blue.}"

server=""
scratch="$(mktemp -d)"

stop_server() {
  if [[ -n "$server" ]]; then
    kill -TERM "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$scratch"
}
trap stop_server EXIT
trap 'exit 130' INT TERM

use_environment

# The server says on its standard output when it listens and when it is ready; if it ends, so does the pipe.
mkfifo "$scratch/output"
"$VENV/bin/slipstream" serve --model "$MODEL" --port 0 --metrics-port 0 --log-level warning \
  >"$scratch/output" &
server=$!
exec 3<"$scratch/output"

target="" ready=""
while read -r line <&3; do
  case "$line" in
    "listening on "*) target="${line#listening on }" ;;
    "ready: "*)
      ready=1
      break
      ;;
  esac
done
[[ -n "$ready" ]] || die "the server ended before it was ready; its message stands above"
"$VENV/bin/slipstream" health --target "$target" --wait 60 >/dev/null ||
  die "the server at $target does not say that it serves"

say "$MODEL at $target"
printf '> %s\n' "$PROMPT"
"$VENV/bin/slipstream" chat --target "$target" --max-tokens 128 --temperature 0 "$PROMPT"
