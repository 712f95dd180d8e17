"""Fills documents ahead of time with vLLM, by requests that consist of documents."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn, cast

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.limits import MAX_CHUNKS
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.engines.chunk_cache import WarmState
from kvmosaic.engines.vllm.llm import LLM
from kvmosaic.engines.warm import Chunk, Warmer

PACKED_TOKENS = 8192
"""Approximate number of document tokens per request. The documents of a request share the sink prefix and a few
passes."""
BESIDES = 2
"""Number of tokens that a request needs besides its documents: a question and an answer."""


class VllmWarmer(Warmer):
    """vLLM, configured as it will serve, except that missing documents are filled before anything else."""

    def __init__(self, model: str, dtype: str, options: str, **settings: Any) -> None:
        """``options`` are command-line options of ``vllm serve`` that affect KV."""
        fills = {"miss_policy": "fill-first", "recompute_ratio": 0.0, "client_parameters": "boundaries"}
        self._llm = LLM(model, dtype=dtype, **parse_options(options), **(settings | fills))
        off = self._llm.get_stats()["off_reason"]
        if off is not None:
            raise ConfigError(f"the chunk cache is off: {off}")
        tokenizer = cast(Any, self._llm.get_tokenizer())  # vLLM's type for it lacks some methods
        config = self._llm.chunk_cache_config
        self.parser = ChunkTokenParser(tokenizer, config.chunk_separator, config.min_chunk_tokens)
        self._room = self._llm.llm_engine.vllm_config.model_config.max_model_len - BESIDES

    def states(self, chunks: Sequence[Chunk]) -> list[WarmState]:
        by_rank = self._llm.collective_rpc("chunk_cache_warm_states", args=([list(chunk) for chunk in chunks],))
        states: list[WarmState] = []
        for chunk, ranks in zip(chunks, zip(*by_rank, strict=True), strict=True):
            if len(chunk) > self._room:
                states.append("too-long")
            else:
                states.append(cast(WarmState, next((state for state in ranks if state != "kept"), "kept")))
        return states

    def fill(self, chunks: Sequence[Chunk]) -> None:
        for packed in self._requests(chunks):
            tokens = [token for chunk in packed for token in chunk]
            edges = [0, *accumulate(map(len, packed))]
            boundaries = [(0, 0), *pairwise(edges), (len(tokens), len(tokens) + 1)]
            sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"boundaries": boundaries}})
            # One at a time: a request has to be able to borrow blocks for its longest document.
            self._llm.generate({"prompt_token_ids": [*tokens, tokens[0]]}, sampling, use_tqdm=False)
            self.states(())  # waits until all is written; an engine's steps do not wait, and drop excess writes

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _requests(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        packed: list[Chunk] = []
        for chunk in chunks:
            is_long = sum(map(len, packed)) + len(chunk) > min(PACKED_TOKENS, self._room)
            if packed and (is_long or len(packed) == MAX_CHUNKS):
                yield packed
                packed = []
            packed.append(chunk)
        if packed:
            yield packed


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--vllm-options: {message}")


def parse_options(options: str) -> dict[str, Any]:
    """Parse options of vLLM's command line into keywords, keeping those that differ from the defaults."""
    parser = EngineArgs.add_cli_args(_Parser(add_help=False))
    try:
        given, defaults = parser.parse_args(shlex.split(options)), parser.parse_args([])
    except ValueError as error:  # an unclosed quotation
        raise ConfigError(f"--vllm-options: {error}") from None
    return {name: value for name, value in vars(given).items() if value != getattr(defaults, name)}
