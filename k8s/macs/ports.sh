# Ports of a node, fixed so that a firewall can be told. Sourced by join.sh and check.sh; the environment wins.
# shellcheck shell=bash disable=SC2034
: "${GCS_PORT:=6379}" "${DASHBOARD_PORT:=8265}" "${CLIENT_PORT:=10001}"        # the head's own
: "${NODE_MANAGER_PORT:=6380}" "${OBJECT_MANAGER_PORT:=6381}"                  # every node's, both ways
: "${RUNTIME_ENV_PORT:=6382}" "${METRICS_PORT:=6383}"
: "${AGENT_PORT:=52365}" "${AGENT_GRPC_PORT:=52366}"
: "${FIRST_WORKER_PORT:=20000}" "${LAST_WORKER_PORT:=20199}"
