"""Which lanes have read the beginning of a prompt lately: there its next turn may go on from a saved state.

A guess, never more: a lane saves states at message boundaries and drops the oldest, of which it tells nobody.
A wrong guess costs nothing but the prompt's reading, which any other lane would have cost too.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

BLOCK = 64  # tokens that are compared at once
LONGEST = 256 * BLOCK  # of a prompt; whoever has read so much is preferred however busy it is
MOST_BLOCKS = 1 << 16  # about four million tokens
MOST_LANES = 8  # of one block, those that read it last


class Affinity:
    """What one router has sent where. Prompts come as their ``blocks_of``, and no tokens are kept."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._lanes)

    def note(self, lane: str, blocks: Sequence[int]) -> None:
        """A lane is to read this prompt."""
        for block in blocks:
            others = [other for other in self._lanes.get(block, ()) if other != lane]
            self._lanes[block] = (lane, *others[: MOST_LANES - 1])
            self._lanes.move_to_end(block)
        while len(self._lanes) > MOST_BLOCKS:
            self._lanes.popitem(last=False)

    def shared(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """Leading tokens, in whole blocks, that a lane has read already; lanes without any are not named."""
        shared: dict[str, int] = {}
        for number, block in enumerate(blocks, 1):
            lanes = self._lanes.get(block)
            if lanes is None:
                break
            shared.update(dict.fromkeys(lanes, number * BLOCK))
        return shared


def blocks_of(prompt_ids: Sequence[int]) -> Sequence[int]:
    """A hash of each whole block and all before it."""
    blocks: list[int] = []
    chained = 0
    for end in range(BLOCK, min(len(prompt_ids), LONGEST) + 1, BLOCK):
        chained = hash((chained, tuple(prompt_ids[end - BLOCK : end])))
        blocks.append(chained)
    return blocks
