"""Which requests are being computed."""

from collections import deque

from kvmosaic.engines.vllm.compat.scheduling import Step


class RunningRequests:
    """Requests of the latest steps, without those that are finished. vLLM plans a step while earlier ones are still
    in other pipeline stages. It leaves out their requests, so the step may be empty."""

    def __init__(self, stages: int) -> None:
        self._steps: deque[set[str]] = deque(maxlen=stages)

    def __bool__(self) -> bool:
        """Whether a request is being computed, as far as is known."""
        return any(self._steps)

    def follow(self, step: Step) -> None:
        """The workers are given ``step``."""
        self._steps.append(set(step.scheduled))

    def finished(self, request_id: str) -> None:
        """The request is over."""
        for requests in self._steps:
            requests.discard(request_id)
