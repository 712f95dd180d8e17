"""The metrics: their names, labels and meanings. It does not import vLLM, so that the docs are made without it."""

from typing import Literal, NamedTuple, get_args

from kvmosaic.engines.results import Fallback

PREFIX = "kvmosaic:"
"""Prefix of the names of all our Prometheus metrics."""

CountName = Literal[
    "chunk_hits",
    "chunk_misses",
    "chunks_filled",
    "requests",
    "fallbacks",
    "tokens",
    "evictions",
    "write_errors",
    "errors",
    "dropped_writes",
    "dropped_fills",
]
LevelName = Literal["tier_bytes", "tier_entries"]
FailingStage = Literal[
    "lookup", "fetch", "place", "fill", "choose", "compute", "store", "clear", "statistics", "schedule"
]
Stage = Literal["lookup", "fetch", "fill", "remap", "probe", "blend", "load", "predicted"]


class Labelled(NamedTuple):
    """A metric: the label that splits it and that label's known values, which are shown from the start as zero.

    A counter that appears only with its first event has no rate for that event. A metric without a label is
    counted under ``""``."""

    documentation: str
    label: str = ""
    values: tuple[str, ...] = ()


COUNTS: dict[CountName, Labelled] = {
    "chunk_hits": Labelled("Chunks found, by the tier that held them.", "tier", ("device", "host", "disk", "remote")),
    "chunk_misses": Labelled(
        "Chunks not found, by reason.",
        "reason",
        ("new", "evicted", "corrupt", "collision", "error", "slow-tier", "other-rank"),
    ),
    "chunks_filled": Labelled("Chunks whose canonical KV was computed and stored."),
    "requests": Labelled(
        "Requests, by mode: chunks reused and none filled first, some filled first, or served as plain vLLM.",
        "mode",
        ("reuse", "fill", "plain"),
    ),
    "fallbacks": Labelled(
        "Requests with chunks that were served as plain vLLM, by reason.",
        "reason",
        tuple(reason.value for reason in Fallback if reason not in (Fallback.DISABLED, Fallback.ROPE_LENGTH)),
    ),
    "tokens": Labelled(
        "Tokens whose KV was loaded, computed or stored: in chunks, beside them, and in exact prefix blocks.",
        "kind",
        ("reused", "filled", "recomputed", "fresh", "loaded", "saved"),
    ),
    "evictions": Labelled("Entries evicted to make room."),
    "write_errors": Labelled("Entries that a tier failed to store."),
    "errors": Labelled(
        "Failures inside the chunk cache, by the stage that failed. The requests were served nevertheless.",
        "stage",
        get_args(FailingStage),
    ),
    "dropped_writes": Labelled("Entries not written to the slower tiers, because too many were waiting."),
    "dropped_fills": Labelled(
        "Missing chunks that were not filled: only one request had asked for them and no step was quiet for 60 s, no "
        "request used their LoRA adapter for 60 s, or the adapter changed."
    ),
}
# No values: a tier that is not configured has no level, not a level of zero.
LEVELS: dict[LevelName, Labelled] = {
    "tier_bytes": Labelled("Bytes of the entries in each tier, over all ranks.", "tier"),
    "tier_entries": Labelled("Entries in each tier, over all ranks.", "tier"),
}
STAGE_SECONDS = Labelled("Seconds that one stage of loading a request's chunks took.", "stage", get_args(Stage))
STAGE_BUCKETS = [1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
