"""Steps vLLM's engine by hand, and records when each token of each request came."""

import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmosaic.bench.traffic import Prompt

if TYPE_CHECKING:
    from kvmosaic.vllm import LLM


@dataclass
class Request:
    """The course of a request. Times are those of ``time.perf_counter``, in seconds."""

    since: float
    """Arrival time of the request."""
    tokens: list[float] = field(default_factory=list)
    """Time of each generated token."""
    is_finished: bool = False
    chunks: list[dict[str, Any]] = field(default_factory=list)
    """The report on its chunks; empty if it was served as by plain vLLM."""

    def first_token_ms(self, now: float = math.nan) -> float:
        """Milliseconds until the first token, or until ``now`` if there is none yet."""
        return ((self.tokens[0] if self.tokens else now) - self.since) * 1e3

    def gaps_ms(self, begin: float = -math.inf) -> list[float]:
        """Milliseconds between consecutive tokens, for tokens that came after ``begin``."""
        return [(later - sooner) * 1e3 for sooner, later in pairwise(self.tokens) if later > begin]


class Steps:
    """Runs requests in an engine of this process."""

    def __init__(self, llm: "LLM") -> None:
        self._engine = llm.llm_engine
        self._running: dict[str, Request] = {}
        self._count = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def add(self, prompt: Prompt, outputs: int, params: dict[str, Any] | None, since: float | None = None) -> Request:
        """Add a request for ``outputs`` tokens. ``params``: its chunk-cache parameters; ``None`` in an engine without
        a chunk cache. ``since``: its arrival time, if not now."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=outputs,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None
            if params is None
            else {"kv_transfer_params": {"boundaries": prompt.boundaries, "report": True, **params}},
        )
        request = Request(time.perf_counter() if since is None else since)
        self._count += 1
        self._running[str(self._count)] = request
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt.ids}, sampling)
        return request

    def step(self) -> None:
        """Run one step of the engine."""
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            request = self._running.get(output.request_id)
            if request is None:  # aborted
                continue
            request.tokens += [now] * len(output.outputs[0].token_ids)
            if output.finished:
                request.is_finished = True
                request.chunks = (output.kv_transfer_params or {}).get("chunks", [])
                del self._running[output.request_id]

    def finish(self) -> None:
        """Run steps until every request is finished."""
        while self._running:
            self.step()

    def abort(self) -> None:
        """Abort all unfinished requests."""
        self._engine.abort_request(list(self._running))
        self._running.clear()


def percentiles(name: str, values_ms: list[float], shares: tuple[int, ...] = (50, 90, 99)) -> dict[str, float | None]:
    """``{name}_p50_ms`` and so on; ``None`` where there are no values."""
    return {f"{name}_p{share}_ms": float(np.percentile(values_ms, share)) if values_ms else None for share in shares}


def hit_share(requests: list[Request], per_query: int) -> float | None:
    """Share of the chunks of finished requests, ``per_query`` each, that were found; ``None`` if none is finished."""
    finished = [request for request in requests if request.is_finished]
    found = sum(chunk["status"] == "cached" for request in finished for chunk in request.chunks)
    return found / (len(finished) * per_query) if finished else None
