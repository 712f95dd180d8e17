"""Loads that the coming step begins, and those that take several steps."""

from collections.abc import Iterable

from kvmosaic.engines.vllm.messages import ChunkLoad
from kvmosaic.engines.vllm.scheduler_side.admission import Admission
from kvmosaic.engines.vllm.scheduler_side.lending import BlockLender
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.shape import EngineShape
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats


class Loads:
    """Makes the workers' tasks, and counts what they cost the coming step."""

    def __init__(self, shape: EngineShape, admission: Admission, stats: ChunkStats) -> None:
        self._shape = shape
        self._admission = admission
        self._stats = stats
        self.in_slices: set[str] = set()
        """Requests that are being loaded in several steps."""

    def begin(
        self,
        request: ChunkRequest,
        local: int,
        blocks: tuple[tuple[int, ...], ...],
        lender: BlockLender,
        *,
        is_findable: bool,
        is_reported: bool,
    ) -> ChunkLoad:
        """The load of a request that got its ``blocks``, of which vLLM's prefix cache fills the first ``local``
        tokens. ``lender``: lends further blocks."""
        assert local % self._shape.block_size == 0
        spare: tuple[int, ...] = ()
        with self._stats.doing_without("lending blocks"):
            spare = lender.lend(request, local, len(blocks[0]))
        # If slices were planned without filling, chunks that are lost after this plan are computed in them as text.
        plans_no_fill = request.is_long and self._admission.finds_all(request, local)
        fill = self._admission.fills(request, local) and not plans_no_fill
        load = request.load(local, blocks, spare, fill=fill, is_findable=is_findable, is_reported=is_reported)
        if request.is_long:
            request.is_in_slices = True
            self.in_slices.add(request.request_id)
        with self._stats.doing_without("counting a step's tokens"):
            if request.predicted is not None:
                self._stats.observe("predicted", request.predicted)
            self._admission.admit(request, local)
        return load

    def begin_step(self, scheduled: int) -> int:
        """Begin to plan the step behind one in which vLLM computes ``scheduled`` tokens. Returns the number of tokens
        that this one computes for each request in slices."""
        has_slices = bool(self.in_slices)
        tokens = self._admission.slice_tokens(scheduled) if has_slices else 0
        self._admission.begin_step(has_slices=has_slices)
        return tokens

    def done(self, request_ids: Iterable[str]) -> None:
        """All slices of these requests are loaded."""
        self.in_slices.difference_update(request_ids)
        if not self.in_slices:
            self._admission.slices_are_done()
