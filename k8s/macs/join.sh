#!/usr/bin/env bash
# Start this machine as a node of the Ray cluster of Macs, in the foreground (launchd keeps it running).
#
#   join.sh head   ROLE            the first Mac; ROLE is target, drafter or both
#   join.sh worker ROLE HEAD       every other one; HEAD is the first one's address
#
# Bash 3.2 suffices: macOS ships no newer one. DRY_RUN=1 prints the command and starts nothing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=ports.sh
source "$here/ports.sh"

usage() {
  sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2
  exit 2
}
fail() {
  echo "join.sh: $1" >&2
  exit 1
}

[ $# -ge 2 ] || usage
kind=$1 role=$2 head=${3:-}
case $kind in
  head) [ $# -eq 2 ] || usage ;;
  worker) [ $# -eq 3 ] || usage ;;
  *) usage ;;
esac
# What replicas ask for: settings' placement names these (macs/serve.yaml).
case $role in
  target) resources='{"apple_silicon": 1, "dflash_target": 1}' ;;
  drafter) resources='{"apple_silicon": 1, "dflash_drafter": 1}' ;;
  both) resources='{"apple_silicon": 1, "dflash_target": 1, "dflash_drafter": 1}' ;;
  *) usage ;;
esac

# The environment of `make venv`; its `python` must be first, since jobs start it by name.
venv=${VENV:-$here/../../.venv}
[ -x "$venv/bin/ray" ] || fail "no Ray in $venv: say VENV=DIRECTORY, or run make venv"
export PATH="$venv/bin:$PATH"

# Without the first, ray start refuses more than one machine on macOS, and nodes call themselves localhost.
# Every process of Ray on this machine inherits these, those of other terminals do not: see README.md.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.proxy.middlewares
export RAY_SERVE_PROXY_USE_GRPC=1
export RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=67108864
export RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=1073741824
export RAY_AUTH_MODE=token
token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
if [ -z "${RAY_AUTH_TOKEN:-}" ]; then
  [ -s "$token" ] || fail "no token in $token: on the head run 'ray get-auth-token --generate', on others copy that file"
  chmod 600 "$token"
fi

# The address that the others reach this machine by.
address=${NODE_ADDRESS:-}
if [ -z "$address" ] && command -v ipconfig >/dev/null; then
  address=$(ipconfig getifaddr "${INTERFACE:-en0}" || true)
fi
[ -n "$address" ] || fail "no address on ${INTERFACE:-en0}: say NODE_ADDRESS=10.0.0.5 or INTERFACE=en1"

# macOS caps the object store at 2 GB; socket paths end at 103 bytes, so the folder's name is short.
set -- --block "--node-ip-address=$address" "--resources=$resources" \
  --object-store-memory=2000000000 "--temp-dir=${RAY_FOLDER:-/tmp/ray}" --disable-usage-stats \
  "--node-manager-port=$NODE_MANAGER_PORT" "--object-manager-port=$OBJECT_MANAGER_PORT" \
  "--runtime-env-agent-port=$RUNTIME_ENV_PORT" "--metrics-export-port=$METRICS_PORT" \
  "--dashboard-agent-listen-port=$AGENT_PORT" "--dashboard-agent-grpc-port=$AGENT_GRPC_PORT" \
  "--min-worker-port=$FIRST_WORKER_PORT" "--max-worker-port=$LAST_WORKER_PORT"
if [ "$kind" = head ]; then
  set -- --head "--port=$GCS_PORT" "--dashboard-host=$address" "--dashboard-port=$DASHBOARD_PORT" \
    "--ray-client-server-port=$CLIENT_PORT" "$@"
else
  set -- "--address=$head:$GCS_PORT" "$@"
fi
if [ -n "${DRY_RUN:-}" ]; then
  printf '%s\n' ray start "$@"
  exit 0
fi
exec ray start "$@"
