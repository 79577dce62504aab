"""What every arm is given, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_core.checkpoints import LoadedTarget, load_target
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.request import RowRequest

Answers = list[tuple[int, ...]]  # token ids, the stop token too, in the order of the requests
Play = Callable[[], Answers]


@dataclass(frozen=True)
class Setting:
    """One pair, one list of greedy requests, and how many rows may move together."""

    target: Path
    drafter: Path
    requests: list[RowRequest]
    rows: int

    @cached_property
    def loaded(self) -> LoadedTarget:
        """The target in mlx-lm's own classes, for the arms that patch nothing."""
        return load_target(self.target)

    @cached_property
    def lane(self) -> LoadedLane:
        """The pair as our engine has it."""
        return load_lane(self.target, self.drafter)

    @property
    def stop_token_ids(self) -> list[int]:
        """Stop tokens of all requests; batched peers know no others than common ones."""
        return sorted(self.requests[0].stop_token_ids)

    @cached_property
    def transformers_tokenizer(self) -> Any:
        """What peers call a tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.target))
