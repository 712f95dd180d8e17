"""Which blocks the forward of a step is going to write."""

from typing import Any


class BlockTables:
    """The block tables of all running requests, followed through what the scheduler tells the workers.

    vLLM puts a block into its prefix cache when it schedules the step that will fill it, so a request may be given
    blocks that are empty until that step's own forward. Our forwards run before it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}

    def follow(self, step: Any) -> None:
        """Take in one ``SchedulerOutput``; every one has to pass here."""
        for request_id in step.finished_req_ids:
            self._tables.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        cached = step.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = []
            if blocks is not None:
                self._tables.setdefault(request_id, []).extend(blocks[0])

    def blocks(self, request_id: str) -> list[int]:
        """The blocks of a request, as of the latest step."""
        return self._tables.get(request_id, [])

    @staticmethod
    def running_before(step: Any) -> dict[str, int]:
        """How many tokens of each request that goes on in ``step`` earlier steps computed. Requests that begin or
        come back may hold blocks that are only going to be written."""
        cached = step.scheduled_cached_reqs
        computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return {request_id: count for request_id, count in computed if request_id not in cached.resumed_req_ids}

    def written_by(self, step: Any) -> set[int]:
        """The blocks that the forward of ``step`` writes to."""
        cached = step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        size, written = self._block_size, set()
        for request_id, start in computed.items():
            end = start + step.num_scheduled_tokens[request_id]
            written.update(self._tables.get(request_id, [])[start // size : -(-end // size)])
        return written
