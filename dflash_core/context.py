"""How many of a round's features enter each row's drafter context. Pure functions on counts.

``per_row``: exactly the inputs that the row kept. ``shared``: as many for every row as the longest
row kept, the rejected ones with them, in one rectangle: what the best public system does, here for
measuring only.
"""

from collections.abc import Callable

import numpy as np

ContextPolicy = Callable[[np.ndarray], np.ndarray]  # kept inputs [B], 0 for idle -> features taken [B]


def per_row(kept: np.ndarray) -> np.ndarray:
    """Every row's context grows by what the row kept."""
    return kept


def shared(kept: np.ndarray) -> np.ndarray:
    """Every live row's context grows by the longest row's count."""
    return np.where(kept > 0, kept.max(initial=0), 0).astype(np.int32)


CONTEXT_POLICIES: dict[str, ContextPolicy] = {"per_row": per_row, "shared": shared}
