"""The time that a request waits for stored KV in slower tiers."""

from kvmosaic.engines.vllm.scheduler_side.admission import Admission

MOST_SECONDS = 30.0
"""Maximum time, in seconds."""
LEAST_SECONDS = 1.0
"""Minimum time, in seconds, even if a prefill is faster: a disk may be busy for a moment."""
LEAST_STEPS = 2.0
"""Minimum time, in full prefill steps: a fetch begins with one step, and its end is reported after the next."""
UNMEASURED_SECONDS = 5.0
"""Time before the speed of a prefill was measured, in seconds."""


def patience_for(tokens: int, admission: Admission) -> float:
    """Seconds that a request waits for KV of ``tokens`` tokens: as long as computing them is predicted to take. So
    waiting in vain at most doubles the time to its first token, beyond the minimum."""
    predicted, step = admission.prefill_seconds(tokens), admission.step_seconds
    if predicted is None or step is None:
        return min(MOST_SECONDS, max(LEAST_SECONDS, UNMEASURED_SECONDS))
    return min(MOST_SECONDS, max(LEAST_SECONDS, LEAST_STEPS * step, predicted))
