"""The LoRA adapters of requests, by the weights that the workers have for them."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvmosaic.engines.vllm.compat.scheduling import Step
from kvmosaic.engines.vllm.messages import Adapter
from kvmosaic.engines.vllm.parameters import RequestParameters
from kvmosaic.engines.vllm.scheduler_side.block_salts import BlockSalt

MAX_KNOWN = 4096
"""Maximum number of adapters that are remembered."""


class _Named(NamedTuple):
    """The adapter that a name stood for when a request used it last."""

    digest: bytes
    changes: int
    """Number of times that its weights had changed."""
    salt: BlockSalt | None


class KnownAdapters:
    """Reports of workers about adapters. An adapter stays known when vLLM unloads it: it will most likely be
    loaded again as it was, and workers compare its weights before they use them."""

    def __init__(self, ranks: int) -> None:
        self._digests: list[OrderedDict[int, bytes]] = [OrderedDict() for _ in range(ranks)]
        """By rank: digests by vLLM's number of the adapter."""
        self._changes: dict[int, int] = {}
        """By number: how many times its weights have changed."""
        self._names: OrderedDict[str, _Named] = OrderedDict()
        self._of: dict[str, int] = {}
        """Numbers of the adapters of current requests, by request."""
        self._unplanned: dict[str, RequestParameters] = {}
        """Parameters of requests that wait to be planned."""

    def update(self, rank: int, digests: Mapping[int, bytes]) -> None:
        """A rank has loaded adapters."""
        known = self._digests[rank]
        for adapter_id, digest in digests.items():
            if known.get(adapter_id, digest) != digest:
                self._changes[adapter_id] = self._changes.get(adapter_id, 0) + 1
            known[adapter_id] = digest
            known.move_to_end(adapter_id)
        while len(known) > MAX_KNOWN:
            self._changes.pop(known.popitem(last=False)[0], None)

    def add(self, request: Any) -> BlockSalt | None:
        """Follow a request. Returns a salt for its block hashes, if its adapter's weights have changed under the same
        name: vLLM's prefix cache may still have KV of the old weights."""
        lora = request.lora_request
        if lora is None:
            return None
        self._of[request.request_id] = lora.lora_int_id
        before, adapter = self._names.get(lora.lora_name), self.of(request)
        if adapter is None:
            return None if before is None else before.salt
        changes = self._changes.get(adapter.id, 0)
        if before is None or (before.digest, before.changes) != (adapter.digest, changes):
            salt = None
            if before is not None:
                # A chain: salts never come back, even if the weights do. Requests that run during a change leave KV
                # of both in vLLM's prefix cache.
                earlier = b"" if before.salt is None else before.salt.digest
                digest = hashlib.sha256(b"adapter" + adapter.digest + earlier).digest()
                salt = BlockSalt(digest, 0, None, is_hidden=False)
            self._names[lora.lora_name] = before = _Named(adapter.digest, changes, salt)
        self._names.move_to_end(lora.lora_name)
        while len(self._names) > MAX_KNOWN:
            self._names.popitem(last=False)
        return before.salt

    def finished(self, request_id: str) -> None:
        """Stop following a request."""
        self._of.pop(request_id, None)
        self._unplanned.pop(request_id, None)

    def plan_later(self, request: Any, params: RequestParameters) -> None:
        """Keep the parameters of a request whose adapter is not known. Workers may know it when its turn comes: they
        load the adapter for the first of several requests."""
        self._unplanned[request.request_id] = params

    def take_planned(self, request: Any) -> RequestParameters | None:
        """The parameters of a request that was to be planned later, if its adapter is known now."""
        return None if self.of(request) is None else self._unplanned.pop(request.request_id, None)

    def stays_unknown(self, request: Any) -> bool:
        """Whether a request begins although its adapter never became known."""
        return self._unplanned.pop(request.request_id, None) is not None

    def of(self, request: Any) -> Adapter | None:
        """The adapter of a request; ``None`` if it has none, or if not all ranks have reported the
        same weights for it."""
        return None if request.lora_request is None else self._adapter(request.lora_request.lora_int_id)

    def in_step(self, step: Step) -> frozenset[Adapter]:
        """The adapters of a step's requests, which are active in it."""
        ids = {self._of[request_id] for request_id in step.scheduled if request_id in self._of}
        return frozenset(adapter for adapter in map(self._adapter, ids) if adapter is not None)

    def _adapter(self, adapter_id: int) -> Adapter | None:
        digests = {known.get(adapter_id) for known in self._digests}
        digest = digests.pop()
        return None if digests or digest is None else Adapter(adapter_id, digest)
