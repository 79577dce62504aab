"""Every live row's features, kept on the target side until the row ends.

With them a drafter's state can be made again at any time: after its death, an upgrade, an eviction. What
the drafter is known to hold (``confirmed``) is not sent again. ``retention`` bounds what is kept.
"""

from typing import cast

import numpy as np

from deployments.exchange.messages import Piece, RowFeatures
from deployments.exchange.retention import Retention, RowLedger
from deployments.exchange.transport import Transport
from dflash_core.prefixes import SavedContext
from dflash_core.request import RowId

MERGE_TOKENS = 256  # committed pieces are merged when so many tokens have come together


class Ledger:
    """The rows of one window."""

    def __init__(self, transport: Transport, retention: Retention | None = None):
        self._transport = transport
        self._retention = retention or Retention()
        self._rows: dict[RowId, RowLedger] = {}

    def can_draft(self, row_id: RowId) -> bool:
        """Whether the drafter's context of this row is whole, or can be made so from what is kept."""
        return row_id in self._rows and not self._rows[row_id].is_lost

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
        row.length += len(data)
        if row.is_lost:
            return
        row.pieces.append(Piece(start, len(data), data))
        row.loose += 1
        row.token_bytes = data.nbytes // len(data)
        self._merge(row)
        self._retention.add(row, data.nbytes)

    def save(self, row_id: RowId, length: int) -> SavedContext | None:
        """All features of a row that has ``length`` of them, in few pieces; None if they are not all here.

        The pieces are shared, not copied: none ever changes. A ref among them keeps its object in the store.
        """
        row = self._rows.get(row_id)
        if row is None or row.is_lost or row.length != length or row.kept_from > 0:
            return None
        _join_loose(row)
        return SavedContext(length, row.num_bytes, tuple(row.pieces))

    def restore(self, row_id: RowId, saved: SavedContext) -> None:
        """Begin a row with features that ``save`` gave, of which the drafter has none yet."""
        pieces = list(cast(tuple[Piece, ...], saved.content))
        token_bytes = saved.num_bytes // saved.length
        row = self._rows[row_id] = RowLedger(pieces, saved.length, token_bytes=token_bytes)
        self._retention.add(row, saved.num_bytes)

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
            if row.confirmed < row.kept_from:
                self._retention.give_up(row)

    def confirm_all(self, lengths: dict[RowId, int]) -> None:
        """Take a drafter's word on every row; a row that it does not name starts anew."""
        for row_id in self._rows:
            self.confirm(row_id, lengths.get(row_id, 0))

    def drop(self, row_id: RowId) -> None:
        """The row ended: its features, refs included, are let go."""
        row = self._rows.pop(row_id, None)
        if row is not None:
            self._retention.remove(row)

    def close(self) -> None:
        """All rows ended."""
        for row_id in list(self._rows):
            self.drop(row_id)

    def _merge(self, row: RowLedger) -> None:
        """Join the loose tail into one array once it is long; a round's few tokens would be many pieces."""
        if sum(piece.count for piece in row.pieces[len(row.pieces) - row.loose :]) >= MERGE_TOKENS:
            _join_loose(row)


def _join_loose(row: RowLedger) -> None:
    first_loose = len(row.pieces) - row.loose
    tail = row.pieces[first_loose:]
    if tail:
        arrays = [piece.data for piece in tail if isinstance(piece.data, np.ndarray)]
        count = sum(piece.count for piece in tail)
        row.pieces[first_loose:] = [Piece(tail[0].start, count, np.concatenate(arrays))]
        row.loose = 0


def _without_head(piece: Piece, cut: int) -> Piece:
    if cut == 0:
        return piece
    if isinstance(piece.data, np.ndarray):  # the slice alone is pickled
        return Piece(piece.start + cut, piece.count - cut, piece.data[piece.skip + cut :])
    return Piece(piece.start + cut, piece.count - cut, piece.data, piece.skip + cut)
