"""What a remote lane takes rows on: where it leads, and what its server knows of the contract."""

from dataclasses import dataclass, replace

from deployments.remote.route import Route, is_closed
from deployments.remote.spec import spec_of
from deployments.rpc.spec_fields import used_fields
from deployments.ticket import Ticket


@dataclass(frozen=True, slots=True)
class RemoteTerms:
    """Implements ``lanes.Terms``."""

    own: str  # the id of this cluster
    routes: tuple[Route, ...]  # by way of the lane
    lacks: frozenset[str]  # fields of our specs that its server would pass over

    def objection(self, ticket: Ticket) -> str | None:
        """Why it takes no row like this one."""
        via = ticket.generation.via
        if via and is_closed(via, self.own):
            return "it came from another cluster, and has gone far enough"
        if via and not any(route.is_open((*via, self.own)) for route in self.routes):
            return "a lane leads back to where it came from"
        unknown = self.lacks & _needs(ticket) if self.lacks else frozenset[str]()
        if unknown:
            return f"a lane's server is too old for {', '.join(sorted(unknown))}"
        return None


def _needs(ticket: Ticket) -> frozenset[str]:
    """The fields that the row's spec would use; which tokens it has makes no difference."""
    row = ticket.row_request()
    is_continued = row.prompt_length is not None and len(row.tokens) > row.prompt_length
    row = replace(row, tokens=row.tokens[: 1 + is_continued], prompt_length=1)
    return used_fields(spec_of(row, "any"))
