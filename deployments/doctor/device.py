"""Whether MLX can be imported here, and what it computes on."""

from deployments.doctor.finding import Finding, error, ok


def check_device() -> Finding:
    """Import MLX. Its backend may want a library of the system's: a GPU's driver."""
    try:
        from deployments.machine import backend, processor

        return ok("device", f"{backend()}: {processor()}", device=backend())
    except (ImportError, RuntimeError) as failure:
        remedy = (
            "a CUDA backend needs NVIDIA's driver (libcuda.so.1, as nvidia-smi does); "
            "else make the environment anew: make clean venv"
        )
        return error("device", f"MLX does not work here: {failure}", remedy)
