# Shared by demo.sh and test.sh: a virtual environment with this project in it. To be sourced by bash.
#
#   SLIPSTREAM_VENV   where it is (default: .venv in the repository)
#   PYTHON            which Python makes it (default: the newest suitable one on the PATH)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${SLIPSTREAM_VENV:-$ROOT/.venv}"
MINIMUM="3.11"

say() {
  if [[ -t 2 ]]; then printf '\033[2m%s\033[0m\n' "$*" >&2; else printf '%s\n' "$*" >&2; fi
}

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the first Python that is new enough.
find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.13 python3.12 python3.11 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "Slipstream needs Python $MINIMUM or newer; found $(python3 --version 2>/dev/null || echo none)." \
    "Install one, or name it: PYTHON=/path/to/python $0"
}

# What the environment was made from: it is made anew only when that changes.
fingerprint() {
  "$1" -c '
import hashlib, sys
text = open(sys.argv[1], "rb").read() + f"{sys.version} {sys.argv[2]}".encode()
print(hashlib.sha256(text).hexdigest())' "$ROOT/pyproject.toml" "$ROOT"
}

# use_environment [EXTRA]: makes sure that $VENV holds the project, installed in place, and the extra.
use_environment() {
  local extra="${1:-}" python wanted stamp
  python="$(find_python)" || exit 1
  wanted="$(fingerprint "$python")"
  stamp="$VENV/.slipstream${extra:+-$extra}"
  if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
    return
  fi
  say "making a virtual environment in $VENV (once; a minute or so)"
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv "$VENV" || die "could not make a virtual environment in $VENV." \
      "On Debian or Ubuntu: apt install python3-venv"
  fi
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ROOT${extra:+[$extra]}" ||
    die "pip could not install the project; its message stands above." \
      "It needs a package index: is the network, or PIP_INDEX_URL, as it should be?"
  printf '%s' "$wanted" | tee "$VENV/.slipstream" >"$stamp"
}
