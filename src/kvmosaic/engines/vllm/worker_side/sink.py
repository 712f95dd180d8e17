"""A learned sink on one rank, as an entry that fills place before their chunks."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.key import ChunkKey, content_hash
from kvmosaic.core.learned_sink import LearnedSink, witness_tokens
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward


def sink_entry(
    learned: LearnedSink,
    model: Any,
    forward: SparseForward,
    ranks: Ranks,
    kv_format: KVFormat,
    text: Sequence[int] = (),
) -> ChunkKV:
    """This rank's part of a learned sink, as an entry at the first positions. Raises :class:`ConfigError` on all
    ranks if the sink was learned for another model, or if ranks read different sinks. ``model`` is vLLM's
    ``ModelConfig``; ``text``: tokens whose KV a draft model gets instead, repeated if there are too few."""
    tokens = witness_tokens(model.get_vocab_size())
    _, v = forward.capture([Run(tokens, 0, forward.kv.free_blocks)])
    problem = None
    try:
        own = kv_format.of_layers(0, len(forward.kv) - 1)
        last = v[len(forward.kv) - 1].transpose(0, 1)
        learned.check(own, last, ranks.share, is_quantised=forward.kv.is_quantised)
    except ConfigError as error:
        problem = str(error)
    told = ranks.gather((problem, learned.digest))
    problem = next((found for found, _ in told if found is not None), None)
    if problem is None and len({digest for _, digest in told}) > 1:
        problem = "the file of the learned sink was replaced while ranks read it; start the engine again"
    if problem is not None:
        raise ConfigError(problem)
    heads = slice(ranks.share.heads.first, ranks.share.heads.last + 1)
    k, v = learned.kv(kv_format.dtype, forward.kv.device, heads)
    if forward.kv.drafts:
        drafted = _drafted(forward, list(islice(cycle(text or tokens), len(learned.tokens))))
        k, v = (torch.cat(parts, dim=1) for parts in zip((k, v), drafted, strict=True))
    key = ChunkKey(content_hash(learned.tokens, ()), len(learned.tokens), "sink", learned.digest, "sink")
    return ChunkKV.from_kv(key, learned.tokens, (), k, v, kv_format.tails)


def _drafted(forward: SparseForward, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K ``[heads, layers, tokens, k_dim]`` and V that a draft model computes for ``text``. A sink is not learned for
    a draft model, but its chunks need an attention sink as well."""
    blocks = [range(1, 1 + -(-len(text) // size)) for size in forward.kv.block_sizes]
    k, v = forward.capture([Run(text, 0, blocks)])
    own_k, own_v = (part[len(forward.kv) :].permute(2, 0, 1, 3) for part in (k, v))
    return own_k, own_v
