"""Runs before any test module: the BLAS must be in the process before MLX is imported."""

import importlib.util

# A guard, not an import: the module decides what it loads, and it must come before everything else.
if importlib.util.find_spec("dflash_core.blas"):
    from dflash_core.blas import prepare

    prepare()
