"""Messages between the scheduler's process and the workers' processes, sent once per step."""

import hashlib
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.vllm.compat.images import moved, nbytes_of, place_of


class Adapter(NamedTuple):
    """A LoRA adapter, as it was when work for it was planned."""

    id: int
    """vLLM's number of it, by which the workers' processes know it."""
    digest: bytes
    """Digest of its weights, 32 bytes. vLLM may load other weights under the same number."""


def adapter_id(adapter: Adapter | None) -> int:
    """vLLM's number of an adapter, 0 for none."""
    return 0 if adapter is None else adapter.id


class Images(NamedTuple):
    """Consecutive tokens with images among them."""

    token_ids: tuple[int, ...]
    """Token ids, with the placeholders of images."""
    features: tuple[Any, ...]
    """vLLM's ``MultiModalFeatureSpec`` of each image, ascending and not overlapping. Positions are relative to the
    first token."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the images."""
        return sum(map(nbytes_of, self.features))

    def between(self, start: int, end: int) -> range:
        """Indices of the images that have tokens among ``start .. end-1``."""
        first = bisect_right(self.features, start, key=lambda feature: place_of(feature)[1])
        last = bisect_left(self.features, end, key=lambda feature: place_of(feature)[0])
        return range(first, last)

    def inside(self, span: Span) -> "Images | None":
        """The tokens of ``span``, which cuts no image; ``None`` if there is no image among them."""
        inner = [self.features[index] for index in self.between(span.start, span.end)]
        if not inner:
            return None
        own = (moved(feature, place_of(feature)[0] - span.start) for feature in inner)
        return Images(self.token_ids[span.start : span.end], tuple(own))


@dataclass(frozen=True, kw_only=True)
class ChunkLoad:
    """The worker's task for one request, before the request's next forward."""

    request_id: str
    prompt: ChunkedPrompt
    digests: tuple[bytes, ...]
    """Content hash of each chunk."""
    ratio: float
    policy: str
    """Name and options of the policy that chooses the recomputed tokens."""
    start: int
    """First token to load: vLLM's own prefix cache has the tokens before it."""
    end: int
    """Position behind the last token to load: the question's start, or that of the prompt's last token. All tokens
    from the question's start on are computed."""
    shared_until: int
    """Number of leading tokens in blocks that other requests may also use. All later blocks belong to this request
    alone."""
    blocks: tuple[tuple[int, ...], ...]
    """The request's block ids, per KV cache group."""
    spare: tuple[int, ...]
    """Additional blocks for filling chunks and for probing the question, for this step only."""
    is_findable: bool
    """Whether other requests may find entries that are stored for this one. Not with a ``cache_salt`` or an adapter,
    nor if weights changed since the request arrived."""
    fill: bool
    """Whether missing chunks are filled first. If not, they are computed as ordinary text."""
    is_sliced: bool
    """Whether it is computed over several steps. If not, this step computes all of it, and vLLM continues from its
    end in the same step."""
    is_reported: bool
    """Whether the scheduler wants to know which tokens are recomputed."""
    may_probe: bool = True
    """Whether the policy may probe the question."""
    adapter: Adapter | None = None
    """The request's adapter, which is active in this step."""
    images: Images | None = None
    """The whole prompt with its images before the question, if it has any. Their tokens in ``prompt`` are
    stand-ins."""

    @property
    def writes_shared(self) -> bool:
        """Whether it writes blocks that another request of this step also uses. Such a load is not sliced, because
        the blocks have to be written before that request's forward."""
        return self.start < self.shared_until

    def blend_digest(self) -> bytes:
        """Digest of everything that a policy's choice depends on. Its content hashes also separate requests that must
        not share a choice."""
        text = repr((self.prompt.chunks, self.ratio, self.policy, self.digests))
        return hashlib.sha256(text.encode() + self.prompt.token_array.tobytes()).digest()


class Recomputed(NamedTuple):
    """The tokens of a request's chunks that were recomputed."""

    spans: list[list[int]]
    """Start and end of each run."""
    probed: bool | None
    """Whether the policy probed the prompt to choose them; ``None`` if no policy was asked."""


@dataclass(frozen=True, kw_only=True)
class ChunkFetch:
    """Entries to fetch into the fastest tier for a waiting request, while other requests run."""

    request_id: str
    chunks: tuple[tuple[bytes, int], ...]
    """Content hash and number of tokens of each."""
    is_exact: bool = False
    """Whether they are parts of an exact prefix."""


@dataclass(frozen=True, kw_only=True)
class ChunkFill:
    """Missing chunks to fill together in the background."""

    context: tuple[int, ...]
    """Tokens that all chunks are computed after."""
    chunks: tuple[tuple[bytes, tuple[int, ...]], ...]
    """Content hash and tokens of each."""
    blocks: tuple[tuple[int, ...], ...]
    """Blocks for the context and all chunks, per KV cache group, for this step only."""
    adapter: Adapter | None = None
    """The adapter that they are computed with, which is active in this step."""
    images: tuple[Images | None, ...] = ()
    """Each chunk with its images, if it has any; empty if none has."""


@dataclass(frozen=True, kw_only=True)
class FillSlice:
    """Some tokens of a missing chunk that is filled in several steps."""

    digest: bytes
    """The chunk's content hash."""
    context_tokens: int
    """Number of tokens that the chunk is computed after. Slices begin with them, unless they are a learned sink."""
    start: int
    """Number of tokens of context and chunk that are already computed or placed."""
    tokens: tuple[int, ...]
    """Tokens to compute in this step."""
    blocks: tuple[tuple[int, ...], ...]
    """Blocks for the context and the whole chunk, per KV cache group; the same in all steps of the chunk."""
    is_last: bool
    adapter: Adapter | None = None
    """The adapter that the chunk is computed with, which is active in this step."""
    images: Images | None = None
    """The whole chunk with its images, if it has any."""
    following: int | None = None
    """The first token of the next slice, if there is one."""


@dataclass(frozen=True, kw_only=True)
class PrefixLoad:
    """Exact prefix segments to load for one request before its next forward."""

    request_id: str
    tokens: tuple[int, ...]
    """The request's tokens up to the end of the segments."""
    digests: tuple[bytes, ...]
    """Content hash of each segment, from the first token on."""
    segment_tokens: int
    start: int
    """First token to load: vLLM's own prefix cache has the tokens before it."""
    blocks: tuple[tuple[int, ...], ...]
    """The request's block ids, per KV cache group."""


@dataclass(frozen=True, kw_only=True)
class PrefixSave:
    """Exact prefix segments to store before this step writes anything."""

    tokens: tuple[int, ...]
    """The request's tokens up to the end of the segments."""
    segments: tuple[tuple[int, bytes], ...]
    """Position and content hash of each."""
    segment_tokens: int
    blocks: tuple[int, ...]


@dataclass(kw_only=True)
class StepWork(KVConnectorMetadata):
    """Message from the scheduler to every worker."""

    engine_id: str
    loads: list[ChunkLoad] = field(default_factory=list)
    fetches: list[ChunkFetch] = field(default_factory=list)
    fills: list[ChunkFill] = field(default_factory=list)
    fill_slice: FillSlice | None = None
    slice_tokens: int = 0
    """Number of tokens to compute for each request that is loaded in slices."""
    prefix_loads: list[PrefixLoad] = field(default_factory=list)
    prefix_saves: list[PrefixSave] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    """Requests that no longer need the entries that were fetched for them."""
    missed: list[tuple[bytes, int]] = field(default_factory=list)
    """Chunks that were not stored, of requests that are served plainly: content hash and number of tokens of each."""
    empties_memory: bool = False
    """Whether to forget all entries in memory first. Disks and remote stores keep theirs."""
    weights: int = 0
    """Number of weight changes that the scheduler knew of when it planned this step."""

    @property
    def is_empty(self) -> bool:
        return self == StepWork(engine_id=self.engine_id, weights=self.weights)

    def anon_repr(self) -> str:
        """Counts only. If a step fails, vLLM logs the text that this method returns; without the method, it would log
        all fields, and so the tokens of everybody's documents."""
        lists = {each.name: getattr(self, each.name) for each in fields(self)}
        counts = (f"{name}={len(value)}" for name, value in lists.items() if isinstance(value, list) and value)
        return f"StepWork({', '.join(counts)})"


TiersInUse = Literal["all", "memory", "none"]
"""Tiers that a rank reads and writes. While its weights cannot be identified, it uses no tier that outlives the
process; if such tiers are already open, it uses no tier at all."""


class Line(NamedTuple):
    """A measured cost: ``fixed + per_token · tokens`` seconds."""

    fixed: float
    per_token: float

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens if tokens else 0.0


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Changes on one rank."""

    rank: int
    """Number among all ranks of tensor and pipeline parallelism."""
    fastest: str
    """Name of its fastest tier."""
    changes: dict[bytes, str | None]
    """By content hash: the fastest tier that has the entry now, if any."""
    fetched: dict[str, frozenset[bytes]]
    """Content hashes of the entries that were not brought, by request whose fetch is done."""
    costs: dict[str, Line]
    """Costs by stage, as measured until now: computing tokens (``blend``), moving them into place (``remap``),
    filling (``fill``), probing (``probe``)."""
    is_off: bool
    """Whether it failed its self-test, so that nothing may be reused."""
    weights: int = 0
    """Number of times that weights have changed."""
    weights_digest: str = ""
    """Digest of the weights, equal in all engines that have the same weights."""
    tiers: TiersInUse = "all"
    max_stored_tokens: int | None = None
    """Number of tokens of the longest chunk that its store has room for; ``None`` without a limit."""
    recomputed: dict[str, Recomputed] = field(default_factory=dict)
    """The recomputed tokens, by request whose load is reported."""
    adapters: dict[int, bytes] = field(default_factory=dict)
    """Digests of adapters that vLLM has loaded since the last report, by number."""
    sources: dict[bytes, str] = field(default_factory=dict)
    """Tiers that had the entries that these fetches brought, by content hash."""
    has_company: bool = False
    """Whether another process was seen to write to its disk."""
    cannot_narrow: bool = False
    """Whether it found that sets of tokens cannot shrink from layer to layer in this model."""
    ended_fills: frozenset[bytes] = frozenset()
    """Content hashes of chunks whose filling in the background is over, whether they are stored or not."""
    is_all: bool = False
    """Whether ``changes`` lists all stored entries, so that earlier reports can be forgotten."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Message from the workers to the scheduler."""

    ranks: list[RankReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Join two reports. vLLM joins the reports of all ranks with this method."""
        assert isinstance(other, StepReport)
        return StepReport([*self.ranks, *other.ranks])
