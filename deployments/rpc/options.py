"""What Serve must be told when it starts, so that its gRPC proxy knows our services."""

import importlib.util
from typing import Any

SMG_PROTO = "smg_grpc_proto"  # the extra "smg"

OUR_SERVICE = "dflash.v1.DFlashService"
MLX_SERVICE = "mlx.grpc.engine.MlxEngine"

_OURS = "deployments.rpc.servicers.add_dflash"
_HEALTH = "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server"
_MLX = "deployments.rpc.servicers.add_mlx_engine"


def serves_mlx_engine() -> bool:
    """Whether the foreign contract's messages are installed."""
    return importlib.util.find_spec(SMG_PROTO) is not None


def services() -> tuple[str, ...]:
    """Full names of the services that have a health of their own."""
    return (OUR_SERVICE, MLX_SERVICE) if serves_mlx_engine() else (OUR_SERVICE,)


def grpc_options(port: int) -> dict[str, Any]:
    """The ``grpc_options`` of ``serve.start``. They are fixed while Serve runs."""
    functions = [_OURS, _HEALTH]
    if serves_mlx_engine():
        functions.append(_MLX)
    return {"port": port, "grpc_servicer_functions": functions, "enable_reflection": True}
