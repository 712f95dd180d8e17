"""The start-up gate's trial inside vLLM. It runs when the KV cache exists and no block of it is in use yet."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.identity import chunk_context
from kvmosaic.engines.self_test import failure, trial_entry, trial_prompts, trial_sink
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.paged.base import RequestBlocks

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""

RUN_TOKENS = 7
"""Number of tokens of each recomputed run, which is a virtual sequence of its own."""


def self_test(
    model: Any,
    sink: Sequence[int],
    context: str,
    forward: SparseForward,
    blocks: RequestBlocks,
    ranks: Ranks,
    *,
    is_sink_placed: bool = False,
    is_int8: bool = False,
) -> str | None:
    """Why chunks must not be reused, in one line, the same on all ranks; ``None`` when all is well. ``model`` is
    vLLM's ``ModelConfig``, ``context`` the setting ``chunk_context``; ``is_sink_placed``: whether fills come after KV
    that is placed, as with a learned sink; ``is_int8``: whether chunks are stored in 8 bits."""
    if ranks.rank == 0:  # on a CPU, the trials of a model take up to half a minute
        logger.info("self-test: comparing moved and reused KV with exact references")
    after = trial_sink(context, sink, model.get_vocab_size(), is_placed=is_sink_placed)
    trials = (
        VllmTrial(prompt, chunk_context(context, prompt, after), forward, blocks, ranks, is_sink_placed, is_int8)
        for prompt in trial_prompts(len(after), model.get_vocab_size(), model.max_model_len)
    )
    quantised = forward.kv.layers[0].quantised
    return failure(trials, model.dtype if quantised is None else quantised.dtype, ranks.count)


class VllmTrial:
    """One prompt, computed in all the ways that have to agree. Outputs are last hidden states ``[question tokens,
    hidden]``. Every rank uses those of the last rank: only the last pipeline stage has any, and all ranks have to
    reach the same verdict and the same next step."""

    def __init__(
        self,
        prompt: ChunkedPrompt,
        context: tuple[int, ...],
        forward: SparseForward,
        blocks: RequestBlocks,
        ranks: Ranks,
        is_sink_placed: bool = False,
        is_int8: bool = False,
    ) -> None:
        self._prompt = prompt
        self._is_int8 = is_int8
        self._is_sink_placed = is_sink_placed
        self._context = context
        self._forward = forward
        self._kv = blocks
        self._ranks = ranks
        # Block 0 is never used. The others are in descending order, so that code that just counts blocks fails.
        length = len(prompt.token_ids)
        self._blocks = [list(range(-(-length // size), 0, -1)) for size in forward.kv.block_sizes]

    def prefill(self, shift: int) -> torch.Tensor:
        return self._outputs([Span(0, len(self._prompt.token_ids))], shift)

    def recomputed(self) -> torch.Tensor:
        question = self._prompt.question
        self._move(self._entries)
        starts = range(0, question.start, RUN_TOKENS)
        runs = [Span(start, min(start + RUN_TOKENS, question.start)) for start in starts]
        return self._outputs([*runs, question])

    def moved(self) -> torch.Tensor:
        self._move(self._entries)
        return self._outputs([self._prompt.system, self._prompt.question])

    def in_8_bits(self) -> torch.Tensor | None:
        if not self._is_int8:
            return None
        self._move(self._filled(replace(self._kv.format, is_int8=True)))
        return self._outputs([self._prompt.system, self._prompt.question])

    def in_place(self, shift: int) -> torch.Tensor:
        """Chunks computed at their own positions. Their KV is captured and written by vLLM's own code, and not by the
        kernel that otherwise does both."""
        forward, prompt, context = self._forward, self._prompt, self._context
        computed = []
        for span in prompt.chunks:
            run = Run([*context, *prompt.tokens_of(span)], 0, self._blocks)
            k, v = forward.capture([run], shift=span.start - len(context) + shift)
            computed.append((span, k[:, len(context) :], v[:, len(context) :]))
        for span, k, v in computed:  # only now, because they were computed in the same blocks
            slots = forward.kv.slots(torch.arange(span.start, span.end, device=forward.kv.device), self._blocks)
            for index, layer in enumerate(forward.kv.layers):
                forward.kv.write(layer, k[index], v[index], slots)
        return self._outputs([prompt.system, prompt.question], shift)

    @cached_property
    def _entries(self) -> list[ChunkKV]:
        return self._filled(self._kv.format)

    def _filled(self, form: KVFormat) -> list[ChunkKV]:
        chunks = [self._prompt.tokens_of(span) for span in self._prompt.chunks]
        sink = None
        if self._is_sink_placed:
            [own] = self._kv.fill((), [self._context], self._blocks, self._kv.format)
            sink = trial_entry(self._context, (), own)
        filled = self._kv.fill(self._context, chunks, self._blocks, form, sink)
        return [trial_entry(tokens, self._context, packed) for tokens, packed in zip(chunks, filled, strict=True)]

    def _move(self, entries: Sequence[ChunkKV]) -> None:
        starts = [span.start for span in self._prompt.chunks]
        self._kv.place(list(zip(entries, starts, strict=True)), self._blocks, 0)

    def _outputs(self, spans: Sequence[Span], shift: int = 0) -> torch.Tensor:
        """Compute these tokens, of which the question's come last, and return the question's outputs."""
        runs = [Run(self._prompt.tokens_of(span), span.start, self._blocks) for span in spans]
        hidden = self._forward.outputs(runs, shift)[-len(self._prompt.question) :]
        return self._ranks.last(hidden.float().cpu())
