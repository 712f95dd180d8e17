"""Which blocks the forward of a step will write."""

from dataclasses import replace
from typing import TypeVar

from kvmosaic.engines.vllm.compat.scheduling import Step
from kvmosaic.engines.vllm.messages import ChunkLoad, PrefixLoad, StepWork

Load = TypeVar("Load", ChunkLoad, PrefixLoad)


class BlockTables:
    """The block tables of all running requests, tracked from the scheduler's messages to the workers.

    vLLM puts a block into its prefix cache when it schedules the step that will fill it, so a request may be given
    blocks that are empty until that step's own forward. Our forwards run before it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}

    def follow(self, step: Step) -> None:
        """Update the tables with one step. To be called for every step."""
        for request_id in step.finished:
            self._tables.pop(request_id, None)
        for request_id in (*step.new, *step.resumed):
            self._tables[request_id] = []
        for request_id, blocks in step.blocks.items():
            self._tables.setdefault(request_id, []).extend(blocks)

    def blocks(self, request_id: str) -> list[int]:
        """The blocks of a request, as of the latest step."""
        return self._tables.get(request_id, [])

    @staticmethod
    def running_before(step: Step) -> dict[str, int]:
        """Number of tokens that earlier steps computed, for each request that continues in ``step``. Requests that
        start or resume are left out: they may hold blocks that are not written yet."""
        return {
            request_id: count
            for request_id, count in step.computed.items()
            if request_id not in step.new and request_id not in step.resumed
        }

    def written_by(self, step: Step) -> set[int]:
        """The blocks that the forward of ``step`` writes to."""
        size, written = self._block_size, set()
        for request_id, start in step.computed.items():
            end = start + step.scheduled[request_id]
            written.update(self._tables.get(request_id, [])[start // size : -(-end // size)])
        return written

    def start_early(self, step: Step, work: StepWork) -> None:
        """Have loads start early enough to compute blocks that are in vLLM's prefix cache but not written yet."""
        if not work.loads and not work.prefix_loads:
            return
        unwritten = self.written_by(step)
        work.loads = [self._start_before(unwritten, load) for load in work.loads]
        # Workers load prefixes first, so blocks that chunk loads write are not written yet, either.
        for load in work.loads:
            unwritten.update(load.blocks[0][load.start // self._block_size :])
        work.prefix_loads = [self._start_before(unwritten, prefix) for prefix in work.prefix_loads]

    def _start_before(self, unwritten: set[int], load: Load) -> Load:
        """The load, starting before its first block that is ``unwritten``: the forward of this step writes it, and
        ours runs before that."""
        known = load.blocks[0][: load.start // self._block_size]
        written = next((index for index, block in enumerate(known) if block in unwritten), len(known))
        return replace(load, start=written * self._block_size)
