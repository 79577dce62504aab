"""What this machine and its software are, as far as the cost of a round depends on it."""

import os
import platform
from importlib.metadata import version

import mlx.core as mx


def backend() -> str:
    """``cpu``, ``metal`` or ``cuda``: where MLX computes."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def processor() -> str:
    """The device's own name, and the cores beside it."""
    name = mx.device_info().get("device_name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def mlx_version() -> str:
    """MLX's version."""
    return version("mlx")
