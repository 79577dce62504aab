#!/usr/bin/env bash
# Look at a Mac before or after it joins: check.sh [HEAD]. Every line is ok, WARNING or ERROR; exit 1 on an error.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=ports.sh
source "$here/ports.sh"
head=${1:-}
venv=${VENV:-$here/../../.venv}
faults=0

ok() { echo "ok       $1"; }
warning() { printf 'WARNING  %s\n         → %s\n' "$1" "$2"; }
error() {
  printf 'ERROR    %s\n         → %s\n' "$1" "$2"
  faults=$((faults + 1))
}

system=$(uname -sm)
if [ "$system" = "Darwin arm64" ]; then
  version=$(sw_vers -productVersion)
  if [ "${version%%.*}" -ge 14 ]; then ok "macOS $version"; else error "macOS $version" "MLX needs macOS 14 or newer"; fi
  if pmset -g | grep -E '^ *sleep +0' >/dev/null; then
    ok "does not sleep"
  else
    warning "this Mac may sleep, and leaves the cluster then" "sudo pmset -a sleep 0 disksleep 0"
  fi
  total=$(($(sysctl -n hw.memsize) / 1048576))
  wired=$(sysctl -n iogpu.wired_limit_mb 2>/dev/null || echo 0)
  if [ "$wired" -eq 0 ]; then
    ok "Metal may wire its default share of $total MB (sudo sysctl iogpu.wired_limit_mb=$((total * 85 / 100)) allows 85 %)"
  else
    ok "Metal may wire $wired of $total MB"
  fi
  if /usr/libexec/ApplicationFirewall/socketfilterfw --getglobalstate | grep enabled >/dev/null; then
    warning "the firewall is on: it must let Python and raylet listen" \
      "sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add $venv/bin/python --unblockapp $venv/bin/python"
  else
    ok "no application firewall"
  fi
else
  warning "this is $system" "Metal needs a Mac with Apple silicon"
fi

if [ -x "$venv/bin/ray" ]; then
  ok "$("$venv/bin/python" --version), $("$venv/bin/ray" --version)"
else
  error "no Ray in $venv" "make venv, with the same Python patch version on every Mac (make venv PYTHON=...)"
fi

token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
if [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -s "$token" ]; then
  ok "a token"
else
  error "no token in $token" "copy ~/.ray/auth_token from the head: mkdir -p ~/.ray && scp HEAD:.ray/auth_token ~/.ray/"
fi

reaches() {
  if command -v nc >/dev/null; then nc -z -w 3 "$1" "$2" 2>/dev/null; else (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; fi
}
if [ -n "$head" ]; then
  for port in "$GCS_PORT" "$NODE_MANAGER_PORT" "$OBJECT_MANAGER_PORT" "$DASHBOARD_PORT"; do
    if reaches "$head" "$port"; then
      ok "$head:$port answers"
    else
      error "$head:$port does not answer" "start join.sh head there, and let its firewall pass the ports of ports.sh"
    fi
  done
  if [ "$faults" -eq 0 ]; then
    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 RAY_AUTH_MODE=token
    "$venv/bin/dflash-serve" doctor --no-trial --address "$head:$GCS_PORT" || faults=$((faults + 1))
  fi
fi
[ "$faults" -eq 0 ]
