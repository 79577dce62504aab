"""Which lanes have read the beginning of a prompt lately: there its next turn may go on from a saved state.

A guess, never more: a lane saves states at message boundaries and drops the oldest, of which it tells nobody.
A wrong guess costs nothing but the prompt's reading, which any other lane would have cost too.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

BLOCK = 64  # tokens that are compared at once
LONGEST = 256 * BLOCK  # of a prompt; whoever has read so much is preferred however busy it is
MOST_BLOCKS = 1 << 16  # about four million tokens
MOST_LANES = 8  # of one block, those that read it last


class Affinity:
    """What one router has sent where. Prompts are kept as chained hashes of their blocks, never as tokens."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._lanes)

    def note(self, lane: str, prompt_ids: Sequence[int]) -> None:
        """A lane is to read this prompt."""
        for block in _chain(prompt_ids):
            others = [other for other in self._lanes.get(block, ()) if other != lane]
            self._lanes[block] = (lane, *others[: MOST_LANES - 1])
            self._lanes.move_to_end(block)
        while len(self._lanes) > MOST_BLOCKS:
            self._lanes.popitem(last=False)

    def shared(self, prompt_ids: Sequence[int]) -> Mapping[str, int]:
        """Leading tokens, in whole blocks, that a lane has read already; lanes without any are not named."""
        shared: dict[str, int] = {}
        for number, block in enumerate(_chain(prompt_ids), 1):
            lanes = self._lanes.get(block)
            if lanes is None:
                break
            shared.update(dict.fromkeys(lanes, number * BLOCK))
        return shared


def _chain(prompt_ids: Sequence[int]) -> Iterator[int]:
    """A hash of each whole block and all before it."""
    chained = 0
    for end in range(BLOCK, min(len(prompt_ids), LONGEST) + 1, BLOCK):
        chained = hash((chained, tuple(prompt_ids[end - BLOCK : end])))
        yield chained
