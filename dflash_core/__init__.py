"""The engine: exact batched speculation in which every row keeps its own state.

Knows MLX and models; knows nothing of Ray, HTTP, gRPC or the environment.

Shape letters, used on every array argument and return:
``B`` rows (slots of a window) · ``K`` block width (anchor + drafts) · ``T`` tokens of a prefill or
feature chunk · ``S`` keys (cache capacity) · ``D`` hidden size · ``F`` concatenated tapped features
(taps x D) · ``V`` vocabulary · ``H`` heads · ``L`` layers.
"""

from dflash_core import blas

# Before anything imports MLX: a library loaded later would not be found.
blas.prepare()
