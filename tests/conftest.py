"""Runs before any test module: the BLAS must be in the process before MLX is imported."""

from dflash_core import blas

blas.prepare()
