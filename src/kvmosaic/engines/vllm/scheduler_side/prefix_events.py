"""Stored-block events: tell routers, through vLLM's KV event stream, which exact prefix blocks the store has.

A segment of a prompt is announced when every rank has reported that it is stored, and withdrawn when one of them
reports that it is gone. Blended blocks are valid for no other prompt and never announced."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import Any, NamedTuple

from kvmosaic.core.window import reachable_block_mask
from kvmosaic.engines.vllm.compat.cache import sliding_window, spec_kind, windowed_kind
from kvmosaic.engines.vllm.compat.scheduling import (
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    event_hash,
    hashes_of_blocks,
)
from kvmosaic.engines.vllm.shape import EngineShape

MEDIUM = "KVMOSAIC"
"""Medium of the blocks in events: any of our tiers."""
MAX_EXPECTED = 4096
"""Maximum number of segments that are expected to be stored. The oldest ones beyond it are forgotten: a store that
refuses segments does not report them."""


class EventGroup(NamedTuple):
    """Layers that keep the same part of a segment. The index of a group in the list of groups is the events'
    ``group_idx``."""

    kind: str
    window: int | None
    """Number of tokens that each token sees; ``None``: all before it."""
    kept: int | None
    """Number of tokens at the end of each segment that are stored; ``None``: all."""


def event_groups(kv_cache_config: Any, tail: int | None) -> list[EventGroup]:
    """The groups that events distinguish. vLLM has one group; layers in which segments keep only the last ``tail``
    tokens are a second one."""
    groups = [EventGroup(spec_kind(kv_cache_config), None, None)]
    if tail is not None:
        groups.append(EventGroup(windowed_kind(), sliding_window(kv_cache_config), tail))
    return groups


class _Segment(NamedTuple):
    """Data of a segment that its event needs."""

    tokens: list[int]
    before: Any
    """Hash of the block before it; ``None`` for the first one."""
    hashes: list[Any]
    """Hashes of its blocks."""


class PrefixEvents:
    """Collects the events of one engine, in the scheduler's process."""

    def __init__(self, has: Callable[[bytes], bool], shape: EngineShape, groups: Sequence[EventGroup]) -> None:
        """``has`` says whether all ranks have the segment of a content hash."""
        self._has = has
        self._segment = shape.segment_tokens
        self._block_size = shape.block_size
        self._hash_block_size = shape.hash_block_size
        # Layers whose window keeps whole segments are like all others.
        self._groups = [group for group in groups if group.kept is None or group.kept < self._segment]
        self._expected: OrderedDict[bytes, _Segment] = OrderedDict()
        self._announced: dict[bytes, list[Any]] = {}
        """Block hashes of each segment, needed to withdraw it."""
        self._events: list[KVCacheEvent] = []

    def expect(self, digest: bytes, start: int, tokens: Sequence[int], hashes: list[Any]) -> None:
        """The segment of a prompt's ``tokens`` that begins at ``start`` is stored, or about to be. It is announced
        once it is stored. ``hashes`` are the prompt's block hashes as vLLM makes them, without salts."""
        if digest in self._announced or digest in self._expected:
            return
        first, end = start // self._block_size, (start + self._segment) // self._block_size
        blocks = hashes_of_blocks(hashes, self._hash_block_size, self._block_size)
        if len(blocks) < end:
            return
        before = event_hash(blocks[first - 1]) if first else None
        own = [event_hash(each) for each in blocks[first:end]]
        segment = _Segment(list(tokens[start : start + self._segment]), before, own)
        if self._has(digest):
            self._announce(digest, segment)
            return
        self._expected[digest] = segment
        if len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)

    def update(self, changed: Collection[bytes]) -> None:
        """Ranks reported changes of entries with these content hashes."""
        news = set(changed)
        for digest in news & self._announced.keys():
            if not self._has(digest):
                self._take_back(digest)
        stored = {digest for digest in news & self._expected.keys() if self._has(digest)}
        # In the order of the prompt, so that parents come first; reports have no order.
        for digest in [digest for digest in self._expected if digest in stored] if stored else ():
            self._announce(digest, self._expected.pop(digest))

    def clear(self) -> None:
        """Memory is emptied, so all segments are withdrawn; those that slower tiers keep are announced again when
        requests have them. vLLM's event for an empty cache would also cover its own blocks."""
        self._expected.clear()
        for digest in list(self._announced):
            self._take_back(digest)

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _announce(self, digest: bytes, segment: _Segment) -> None:
        self._announced[digest] = segment.hashes
        for index, group in enumerate(self._groups):
            skipped = self._stored(group).index(True)
            self._events.append(
                BlockStored(
                    block_hashes=segment.hashes[skipped:],
                    parent_block_hash=segment.hashes[skipped - 1] if skipped else segment.before,
                    token_ids=segment.tokens[skipped * self._block_size :],
                    block_size=self._block_size,
                    lora_id=None,
                    medium=MEDIUM,
                    lora_name=None,
                    extra_keys=[None] * (len(segment.hashes) - skipped),
                    group_idx=index,
                    kv_cache_spec_kind=group.kind,
                    kv_cache_spec_sliding_window=group.window,
                )
            )

    def _take_back(self, digest: bytes) -> None:
        hashes = self._announced.pop(digest)
        for index, group in enumerate(self._groups):
            gone = list(compress(hashes, self._stored(group)))
            self._events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM, group_idx=index))

    def _stored(self, group: EventGroup) -> list[bool]:
        """Which blocks of each segment a group keeps: the last ones."""
        kept = self._segment if group.kept is None else group.kept
        return reachable_block_mask(self._segment, self._block_size, kept, self._segment)
