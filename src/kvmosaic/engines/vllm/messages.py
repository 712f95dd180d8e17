"""What the scheduler's process and the workers' tell each other, once per step."""

import hashlib
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvmosaic.core.prompt import ChunkedPrompt


@dataclass(frozen=True, kw_only=True)
class ChunkLoad:
    """What the worker has to do for one request before its next forward."""

    request_id: str
    prompt: ChunkedPrompt
    digests: tuple[bytes, ...]
    """Content hash of each chunk."""
    ratio: float
    policy: str
    """Name and options of the policy that chooses what is recomputed."""
    start: int
    """The first token to bring: vLLM's own prefix cache has those before it."""
    shared_until: int
    """Tokens in blocks that other requests may use, too; those behind them are this request's own."""
    blocks: tuple[tuple[int, ...], ...]
    """The request's block ids, per KV cache group."""
    spare: tuple[int, ...]
    """Blocks behind the request's own, for filling chunks and for probing the question, for this step alone."""
    is_findable: bool
    """Whether other requests may find what is stored for this one; not if it came with a ``cache_salt``."""
    fill: bool
    """Whether missing chunks are filled first; else they are computed as ordinary text."""
    is_sliced: bool
    """Whether it is computed over several steps; else all in this step, which goes on with the question."""

    @property
    def writes_shared(self) -> bool:
        """Whether it writes blocks that another request of this step is about to use. Such a load is not sliced: they
        have to be written before that request's forward."""
        return self.start < self.shared_until

    def blend_digest(self) -> bytes:
        """Everything that a policy's choice depends on, and, in the content hashes, who may share it."""
        text = repr((self.prompt.chunks, self.ratio, self.policy, self.digests))
        return hashlib.sha256(text.encode() + self.prompt.token_array.tobytes()).digest()


@dataclass(frozen=True, kw_only=True)
class ChunkFetch:
    """Entries to bring to the fastest tier, while other requests run, for a request that waits for them."""

    request_id: str
    chunks: tuple[tuple[bytes, int], ...]
    """Content hash and number of tokens of each."""


@dataclass(frozen=True, kw_only=True)
class ChunkFill:
    """Missing chunks to fill together in the background, behind the step's own forward."""

    context: tuple[int, ...]
    """What all of them are computed after."""
    chunks: tuple[tuple[bytes, tuple[int, ...]], ...]
    """Content hash and tokens of each."""
    blocks: tuple[tuple[int, ...], ...]
    """Room for the context and all of them, per KV cache group, for this step alone."""


@dataclass(frozen=True, kw_only=True)
class FillSlice:
    """Some tokens of a missing chunk that is filled in several steps."""

    digest: bytes
    """The chunk's content hash."""
    context_tokens: int
    """Tokens that the chunk is computed after; slices begin with them."""
    start: int
    """Tokens of context and chunk that earlier steps computed."""
    tokens: tuple[int, ...]
    """Those of this step."""
    blocks: tuple[tuple[int, ...], ...]
    """Room for the context and all of the chunk, per KV cache group, the same in all of these steps."""
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class PrefixLoad:
    """Exact prefix segments to bring for one request before its next forward."""

    request_id: str
    tokens: tuple[int, ...]
    """The request's tokens up to where the segments end."""
    digests: tuple[bytes, ...]
    """Content hash of each segment, from the first token on."""
    segment_tokens: int
    start: int
    """The first token to bring: vLLM's own prefix cache has those before it."""
    blocks: tuple[tuple[int, ...], ...]
    """The request's block ids, per KV cache group."""


@dataclass(frozen=True, kw_only=True)
class PrefixSave:
    """Exact prefix segments to store before this step writes anything."""

    tokens: tuple[int, ...]
    """The request's tokens up to where the segments end."""
    segments: tuple[tuple[int, bytes], ...]
    """Position and content hash of each."""
    segment_tokens: int
    blocks: tuple[int, ...]


@dataclass(kw_only=True)
class StepWork(KVConnectorMetadata):
    """From the scheduler to every worker."""

    engine_id: str
    loads: list[ChunkLoad] = field(default_factory=list)
    fetches: list[ChunkFetch] = field(default_factory=list)
    fills: list[ChunkFill] = field(default_factory=list)
    fill_slice: FillSlice | None = None
    slice_tokens: int = 0
    """Tokens to compute of each request that is loaded in slices."""
    prefix_loads: list[PrefixLoad] = field(default_factory=list)
    prefix_saves: list[PrefixSave] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    """Requests that no longer need what was fetched for them."""
    missed: list[tuple[bytes, int]] = field(default_factory=list)
    """Chunks of requests that are served plainly which were not stored: content hash and number of tokens of each."""
    clear: bool = False
    """Forget all chunks first."""
    weights: int = 0
    """How often weights had changed, as far as the scheduler knew when it planned this."""

    @property
    def is_empty(self) -> bool:
        return self == StepWork(engine_id=self.engine_id, weights=self.weights)


TiersInUse = Literal["all", "memory", "none"]
"""What a rank stores to and looks into. While nobody can tell which weights there are, that is no tier that outlives
it; none at all, if such tiers are open."""


class Line(NamedTuple):
    """A measured cost: ``fixed + per_token · tokens`` seconds."""

    fixed: float
    per_token: float

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens if tokens else 0.0


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What changed on one tensor-parallel rank."""

    rank: int
    fastest: str
    """Name of its fastest tier."""
    changes: dict[bytes, str | None]
    """By content hash: the fastest tier that has the entry now, if any."""
    fetched: list[str]
    """Requests whose fetch is done."""
    costs: dict[str, Line]
    """What computing tokens (``blend``), moving them into place (``remap``) and filling (``fill``) takes, as measured
    until now."""
    is_off: bool
    """Whether it failed its self-test, so that nothing may be reused."""
    weights: int = 0
    """How often weights have changed."""
    weights_digest: str = ""
    """Which weights there are, in all engines that have them."""
    tiers: TiersInUse = "all"
    is_all: bool = False
    """Whether ``changes`` is all there is, so that whatever was reported before can be forgotten."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler."""

    ranks: list[RankReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """vLLM joins the reports of all ranks with this."""
        assert isinstance(other, StepReport)
        return StepReport([*self.ranks, *other.ranks])
