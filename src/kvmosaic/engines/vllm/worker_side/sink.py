"""A learned sink on one rank, as an entry that fills place before their chunks."""

from typing import Any

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.key import ChunkKey, content_hash
from kvmosaic.core.learned_sink import LearnedSink, witness_tokens
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward


def sink_entry(
    learned: LearnedSink, model: Any, forward: SparseForward, ranks: Ranks, kv_format: KVFormat
) -> ChunkKV:
    """This rank's part of a learned sink, as an entry at the first positions. Raises :class:`ConfigError` on all
    ranks if the sink was learned for another model, or if ranks read different sinks. ``model`` is vLLM's
    ``ModelConfig``."""
    tokens = witness_tokens(model.get_vocab_size())
    _, v = forward.capture([Run(tokens, 0, forward.kv.free_blocks)])
    problem = None
    try:
        learned.check(kv_format, v[-1].transpose(0, 1), ranks.share, is_quantised=forward.kv.is_quantised)
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
    key = ChunkKey(content_hash(learned.tokens, ()), len(learned.tokens), "sink", learned.digest, "sink")
    return ChunkKV.from_kv(key, learned.tokens, (), k, v, kv_format.tails)
