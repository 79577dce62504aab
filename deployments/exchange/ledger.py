"""Every live row's features, kept on the target side until the row ends.

With them a drafter's state can be made again at any time: after its death, an upgrade, an eviction. What
the drafter is known to hold (``confirmed``) is not sent again.
"""

from dataclasses import dataclass, field

import numpy as np

from deployments.exchange.messages import Piece, RowFeatures
from deployments.exchange.transport import Transport
from dflash_core.request import RowId

MERGE_TOKENS = 256  # committed pieces are merged when so many tokens have come together


@dataclass
class RowLedger:
    """One row: consecutive pieces from position 0, and how far the drafter has them."""

    pieces: list[Piece] = field(default_factory=list)
    length: int = 0
    confirmed: int = 0
    loose: int = 0  # pieces at the end that are not merged yet


class Ledger:
    """The rows of one window."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._rows: dict[RowId, RowLedger] = {}

    def __contains__(self, row_id: RowId) -> bool:
        return row_id in self._rows

    @property
    def num_pieces(self) -> int:
        """Pieces kept, over all rows."""
        return sum(len(row.pieces) for row in self._rows.values())

    @property
    def num_refs(self) -> int:
        """Pieces that live in the object store."""
        return sum(not isinstance(p.data, np.ndarray) for row in self._rows.values() for p in row.pieces)

    def append(self, row_id: RowId, start: int, data: np.ndarray) -> None:
        """Keep features [T, D] of the positions from ``start`` on; they continue what is kept."""
        row = self._rows.setdefault(row_id, RowLedger())
        if start != row.length:
            raise ValueError(f"row {row_id}: features start at {start}, {row.length} are kept")
        if not len(data):
            return
        row.pieces.append(Piece(start, len(data), data))
        row.length += len(data)
        row.loose += 1
        self._merge(row)

    def missing(self, row_id: RowId) -> RowFeatures:
        """What the drafter lacks of a row.

        A merged array that became a ref stays one here, and its memory is freed. A loose piece stays an
        array: it will be merged.
        """
        row = self._rows[row_id]
        first_loose = len(row.pieces) - row.loose
        sent: list[Piece] = []
        for index, piece in enumerate(row.pieces):
            if piece.start + piece.count <= row.confirmed:
                continue
            if index < first_loose:
                row.pieces[index] = piece = self._transport.store(piece)
            sent.append(_without_head(piece, max(0, row.confirmed - piece.start)))
        return RowFeatures(row_id, row.confirmed, tuple(sent))

    def confirm(self, row_id: RowId, length: int) -> None:
        """The drafter holds this much of the row; more than is kept cannot be right and counts as none."""
        row = self._rows.get(row_id)
        if row is not None:
            row.confirmed = length if length <= row.length else 0

    def confirm_all(self, lengths: dict[RowId, int]) -> None:
        """Take a drafter's word on every row; a row that it does not name starts anew."""
        for row_id in self._rows:
            self.confirm(row_id, lengths.get(row_id, 0))

    def drop(self, row_id: RowId) -> None:
        """The row ended: its features, refs included, are let go."""
        self._rows.pop(row_id, None)

    def _merge(self, row: RowLedger) -> None:
        """Join the loose tail into one array once it is long; a round's few tokens would be many pieces."""
        first_loose = len(row.pieces) - row.loose
        tail = row.pieces[first_loose:]
        count = sum(piece.count for piece in tail)
        if count >= MERGE_TOKENS:
            arrays = [piece.data for piece in tail if isinstance(piece.data, np.ndarray)]
            row.pieces[first_loose:] = [Piece(tail[0].start, count, np.concatenate(arrays))]
            row.loose = 0


def _without_head(piece: Piece, cut: int) -> Piece:
    if cut == 0:
        return piece
    if isinstance(piece.data, np.ndarray):  # the slice alone is pickled
        return Piece(piece.start + cut, piece.count - cut, piece.data[piece.skip + cut :])
    return Piece(piece.start + cut, piece.count - cut, piece.data, piece.skip + cut)
