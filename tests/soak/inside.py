"""Observes an engine from inside. Only this file depends on the internals of vLLM and the connector.

The tokens of a request whose KV is reused are tracked block by block. Besides vLLM's own forward, two calls write KV
into blocks: those that place entries and those that compute tokens. So the right answer is known, even if some chunks
were missing, blocks were shared, or a request was preempted and assembled again.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.soak.slow_calls import SlowCalls

NAME = "soak-"
"""Prefix of the ids of all requests whose traces are searched."""
QUEUE_BYTES = 4 * 2**20
"""Maximum bytes that may wait to be written. The usual limit would never be reached with such small entries."""


class Written(NamedTuple):
    """KV that a worker put into blocks."""

    blocks: tuple[int, ...]
    start: int
    end: int
    """The blocks hold positions ``start .. end-1`` of the sequence."""
    is_reused: bool
    """Whether the KV was computed at another position, and moved."""
    early: int = -1
    """Start of the load in which this was computed before a policy chose tokens, which it has not seen; else -1."""


class Begun(NamedTuple):
    """A request that a step began, or resumed after a preemption."""

    name: str
    outputs: int
    """Number of tokens of its answer at that time."""
    reused: np.ndarray
    """Which tokens before those that vLLM computes have reused KV, ``[tokens]`` bool."""
    early: np.ndarray
    """For each of them that was computed before a choice, and not again behind it, the start of the load; else -1.
    ``[tokens]``"""


# --- in a worker's process, by ``collective_rpc``


def watch_worker(worker: Any) -> list[int]:
    """Record what is written from now on, and shorten the store's queue. Returns the sink prefix."""
    side = get_kv_transfer_group().worker
    side.written, side.computed_tokens = [], 0
    paged, sink = side.paged, tuple(side.cache.sink)
    place, compute = paged.place, paged.compute

    def placing(moves: Any, blocks: Any, start: int) -> Any:
        result = place(moves, blocks, start)
        # The context of exact entries, of system and prefix, is everything before them.
        side.written.append(
            [
                Written(tuple(blocks[0]), max(at, start), at + len(entry.tokens), tuple(entry.context) == sink)
                for entry, at in moves
            ]
        )
        return result

    def computing(runs: Any, *rest: Any) -> Any:
        result = compute(runs, *rest)
        side.computed_tokens += sum(len(run.tokens) for run in runs)
        side.written.append([Written(tuple(run.blocks[0]), run.start, run.end, False) for run in runs])
        return result

    blender = side.loader._blender
    choose = blender.choose

    def choosing(blend: Any) -> Any:
        if blend.needs_context and side.written:  # all its other tokens were computed just now
            own = tuple(blend.load.blocks[0])
            side.written[-1] = [
                each._replace(early=blend.load.start) if each.blocks == own and not each.is_reused else each
                for each in side.written[-1]
            ]
        return choose(blend)

    paged.place, paged.compute, blender.choose = placing, computing, choosing
    side.cache.store._stack.writer._max_bytes = QUEUE_BYTES
    side.slow_calls = SlowCalls()
    worker.execute_model = side.slow_calls.watched(worker.execute_model)
    return list(sink)


def take_written(worker: Any) -> tuple[list[list[Written]], int, float, list[str]]:
    """KV that each call wrote since the last time, the number of tokens that were computed for it besides vLLM's own,
    the seconds that this rank has had to wait for a processor so far, and what its threads did in long steps."""
    side = get_kv_transfer_group().worker
    written, side.written = side.written, []
    computed, side.computed_tokens = side.computed_tokens, 0
    return written, computed, seconds_kept_waiting(), side.slow_calls.take()


def worker_state(worker: Any) -> dict[str, Any]:
    """Leftovers on a worker's side, and counters."""
    side = get_kv_transfer_group().worker
    stats = side.cache.get_stats()
    return {
        "traces": list(traces(side, "worker")),
        "pinned": stats["pinned"],
        "evictions": stats["evictions"],
        "write_errors": stats["write_errors"],
        "hits": stats["cache_hits"],
        "rss": resident_bytes(),
        "threads": threading.active_count(),
    }


# --- in the scheduler's process


class BlockWatch:
    """Tracks which tokens in vLLM's blocks have reused KV."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._scheduler = core_scheduler(llm)
        config = llm.llm_engine.vllm_config.cache_config
        self._size = config.block_size
        self._reused = np.zeros((config.num_gpu_blocks, self._size), dtype=bool)
        self._early = np.full(self._reused.shape, -1)
        self._scheduled: list[Written] = []
        self._begun: list[tuple[str, int, np.ndarray, int]] = []
        self._waits: list[float] = []
        self._stolen: list[float] = []
        self.planned = ""
        """Tokens that the latest step computes."""
        self.slow_calls: list[str] = []
        """What the threads of each rank did in long steps."""
        self.kept_waiting = 0.0
        """Seconds until the latest step in which other programs, or other machines on the same host, had the
        processor that this engine was waiting for. At most that: where both had it, the longer of the two counts."""
        schedule = self._scheduler.schedule

        def scheduling(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._follow(output)
            return output

        self._scheduler.schedule = scheduling
        self.sink = tuple(llm.collective_rpc(watch_worker)[0])

    def _follow(self, output: Any) -> None:
        """Record the tokens that vLLM's forward computes, whatever was in their slots before."""
        self.planned = _planned(output)
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        begins = {*cached.resumed_req_ids, *(new.req_id for new in output.scheduled_new_reqs)}
        for request_id, start in computed.items():
            blocks = self._scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            end = start + output.num_scheduled_tokens[request_id]
            self._scheduled.append(Written(tuple(blocks), start, end, False))
            if request_id in begins:
                request = self._scheduler.requests[request_id]
                self._begun.append((request_id, request.num_output_tokens, np.array(blocks), start))

    def _note(self, together: Iterable[Written]) -> None:
        """Record KV that was written into blocks."""
        for blocks, start, end, is_reused, early in together:
            positions = np.arange(start, max(start, end))
            where = np.asarray(blocks)[positions // self._size], positions % self._size
            self._reused[where] = is_reused
            self._early[where] = early

    def after_step(self) -> list[Begun]:
        """Requests that the step began. Workers load their chunks before vLLM's own forward."""
        ranks = self._llm.collective_rpc(take_written)
        waits, stolen = [seconds for _, _, seconds, _ in ranks], seconds_stolen()
        self.slow_calls += [f"rank {i}: {each}" for i, (*_, slow) in enumerate(ranks) for each in slow]
        if ranks[0][1]:
            self.planned += f", computed {ranks[0][1]} for these"
        self.kept_waiting += max(_growth(waits, self._waits), _growth(stolen, self._stolen))
        self._waits, self._stolen = waits, stolen
        for together in ranks[0][0]:
            self._note(together)
        self._note(self._scheduled)
        begun = []
        for request_id, outputs, blocks, start in self._begun:
            positions = np.arange(start)
            where = blocks[positions // self._size], positions % self._size
            begun.append(Begun(own_name(request_id), outputs, self._reused[where], self._early[where]))
        self._begun.clear()
        self._scheduled.clear()
        return begun


def _planned(output: Any) -> str:
    """Number of tokens of a step: vLLM's own, and those that the connector gives its workers."""
    work = output.kv_connector_metadata
    loads = [
        f"{load.prompt.question.start - load.start} at {load.ratio:g} by {load.policy or 'none'}"
        + (", sliced" if load.is_sliced else "")
        for load in work.loads
    ]
    fills = [str(len(tokens)) for fill in work.fills for _, tokens in fill.chunks]
    fills += [f"slice of {len(work.fill_slice.tokens)}"] if work.fill_slice is not None else []
    parts = [f"vLLM {output.total_num_scheduled_tokens}"]
    parts += [f"slices of {work.slice_tokens}"] if work.slice_tokens else []
    parts += [f"loads {'; '.join(loads)}"] if loads else []
    parts += [f"fills {' + '.join(fills)}"] if fills else []
    parts += [f"{len(work.prefix_saves)} prefix saves"] if work.prefix_saves else []
    return ", ".join(parts)


def core_scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def own_name(request_id: str) -> str:
    """Our name of a request, without vLLM's addition."""
    return request_id.rpartition("-")[0] if request_id.count("-") > NAME.count("-") else request_id


def chunks_of(llm: Any, name: str) -> tuple[tuple[int, int], ...] | None:
    """Spans in which the connector found chunks of a new request; ``None`` if the request is served as by plain
    vLLM."""
    for request_id, request in core_scheduler(llm).connector.scheduler._requests.items():
        if own_name(request_id) == name:
            return tuple((span.start, span.end) for span in request.prompt.chunks)
    return None


def waiting_fills(llm: Any) -> int:
    """Chunks that wait to be filled in the background."""
    return len(core_scheduler(llm).connector.scheduler._backlog)


def preemptions(llm: Any) -> dict[str, int]:
    """Number of preemptions of each unfinished request."""
    return {own_name(name): request.num_preemptions for name, request in core_scheduler(llm).requests.items()}


def engine_state(llm: Any) -> dict[str, Any]:
    """Leftovers of requests when there are none, in all tables on both sides."""
    scheduler = core_scheduler(llm)
    pool = scheduler.kv_cache_manager.block_pool
    ranks = llm.collective_rpc(worker_state)
    side = scheduler.connector.scheduler
    left = [
        *traces(side, "scheduler"),
        *(f"rank {i}: {each}" for i, rank in enumerate(ranks) for each in rank["traces"]),
    ]
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:  # one is vLLM's own
        left.append(f"{pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()} of vLLM's blocks are not free")
    left += [f"rank {i}: {rank['pinned']} entries are pinned" for i, rank in enumerate(ranks) if rank["pinned"]]
    return {
        "left": left,
        "evictions": sum(rank["evictions"] for rank in ranks),
        "write_errors": sum(rank["write_errors"] for rank in ranks),
        "hits": ranks[0]["hits"],
        "rss": max(rank["rss"] for rank in ranks),
        "threads": max(rank["threads"] for rank in ranks),
    }


# --- in any process


def traces(root: object, name: str) -> Iterator[str]:
    """Places in our objects below ``root`` that still hold the id of a request."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [(name, root)]
    while waiting:
        path, each = waiting.pop()
        if isinstance(each, str):
            if each.startswith(NAME):
                yield path
            continue
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Mapping):
            waiting += [(path, key) for key in each if isinstance(key, str)]
            waiting += [(f"{path}[…]", value) for value in each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting += [(f"{path}[…]", value) for value in each if not isinstance(value, (int, float))]
        elif type(each).__module__.startswith("kvmosaic"):
            names = [*vars(each)] if hasattr(each, "__dict__") else getattr(type(each), "__slots__", ())
            ours = [name for name in names if name not in ("written", "slow_calls")]
            waiting += [(f"{path}.{name}", getattr(each, name, None)) for name in ours]


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def seconds_kept_waiting() -> float:
    """Seconds that this thread has waited for a processor so far, because other programs had it."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def seconds_stolen() -> list[float]:
    """For each processor of a virtual machine, the seconds so far in which its host gave it to others."""
    try:
        with open("/proc/stat") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
    except OSError:
        return []
    return [int(line[8]) / os.sysconf("SC_CLK_TCK") for line in lines[1:]]  # the first one is all of them


def _growth(now: list[float], before: list[float]) -> float:
    """The largest growth of any of these numbers; 0 for the first ones."""
    return max((new - old for new, old in zip(now, before, strict=False)), default=0.0)
