"""``DrafterLink`` over a Serve handle: sticky by window id, by reference or by value per call."""

from ray.serve.handle import DeploymentHandle

from deployments.exchange.messages import DraftCall, DraftReply
from dflash_core.request import RowId, WindowId


class HandleLink:
    """Calls go to the replica that the consistent-hash ring names for the window."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle
        self._bound: dict[tuple[WindowId, str, bool], DeploymentHandle] = {}  # options are dear to set

    async def draft(self, call: DraftCall, by_reference: bool) -> DraftReply:
        """One round."""
        return await self._to(call.window_id, "draft", by_reference).remote(call)

    async def lengths(self, window_id: WindowId) -> dict[RowId, int]:
        """A ping that also tells what is held."""
        return await self._to(window_id, "lengths").remote(window_id)

    async def close(self, window_id: WindowId) -> None:
        """Forget a window."""
        await self._to(window_id, "close").remote(window_id)
        for key in [key for key in self._bound if key[0] == window_id]:
            del self._bound[key]

    def _to(self, window_id: WindowId, method: str, by_reference: bool = False) -> DeploymentHandle:
        key = (window_id, method, by_reference)
        if key not in self._bound:
            self._bound[key] = self._handle.options(
                method_name=method,
                session_id=window_id,
                request_serialization="pickle",  # by value; cloudpickle walks every object in Python
                _by_reference=by_reference,
            )
        return self._bound[key]
