"""The start-up self-test of a transformers model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from kvmosaic.blend.base import Selection
from kvmosaic.core.entry import KVFormat, PackedKV
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.chunk_cache import KV
from kvmosaic.engines.hf.model import HFModel
from kvmosaic.engines.hf.request_kv import RequestKV
from kvmosaic.engines.identity import chunk_context
from kvmosaic.engines.self_test import SHIFT, failure, trial_entry, trial_prompts, trial_sink


def self_test(
    engine: HFModel, sink: Sequence[int], context: str, *, is_sink_placed: bool = False, is_int8: bool = False
) -> str | None:
    """Why chunks of this model must not be reused, in one line; ``None`` if the test succeeds. ``context`` is the
    setting ``chunk_context``. ``is_sink_placed``: whether fills come after placed KV, as with a learned sink.
    ``is_int8``: whether chunks are stored in 8 bits."""
    vocabulary = engine.model.config.get_text_config().vocab_size
    after = trial_sink(context, sink, vocabulary, is_placed=is_sink_placed)
    prompts = trial_prompts(len(after), vocabulary, engine.max_positions)
    while prompts and engine.fingerprint(len(prompts[0].token_ids) + SHIFT) is None:
        # Beyond some length, some models have a different rotary table for every prompt length.
        prompts = trial_prompts(len(after), vocabulary, (len(prompts[0].token_ids) + SHIFT) // 2)
    trials = (
        HFTrial(engine, prompt, chunk_context(context, prompt, after), is_sink_placed, is_int8) for prompt in prompts
    )
    return failure(trials, engine.format.dtype)


class HFTrial:
    """One prompt, computed in all ways that have to agree. Outputs are logits ``[question tokens, vocab]``."""

    def __init__(
        self,
        engine: HFModel,
        prompt: ChunkedPrompt,
        context: tuple[int, ...],
        is_sink_placed: bool = False,
        is_int8: bool = False,
    ) -> None:
        self._engine = engine
        self._is_int8 = is_int8
        self._is_sink_placed = is_sink_placed
        self._prompt = prompt
        self._context = context
        self._length = len(prompt.token_ids)

    def prefill(self, shift: int) -> torch.Tensor:
        return self._engine.plain_logits(self._prompt.token_ids, len(self._prompt.question), shift)

    def recomputed(self) -> torch.Tensor:
        """First everything, then again the question and every second token before it. With gaps between tokens, our
        mask decides which keys a token sees."""
        question = self._prompt.question
        with self._engine.session():
            kv = self._moved_kv(self._engine.format)
            self._forward(range(self._length), kv)
            return self._forward([*range(0, question.start, 2), *question.positions], kv)

    def moved(self) -> torch.Tensor:
        return self._moved(self._engine.format)

    def in_8_bits(self) -> torch.Tensor | None:
        return self._moved(replace(self._engine.format, is_int8=True)) if self._is_int8 else None

    def _moved(self, form: KVFormat) -> torch.Tensor:
        with self._engine.session():
            kv = self._moved_kv(form)
            return self._engine.blend(self._prompt, Selection(), kv, self._length, len(self._prompt.question))

    def in_place(self, shift: int) -> torch.Tensor:
        engine, prompt, context = self._engine, self._prompt, self._context
        kv = self._empty_kv()
        with engine.session():
            for span in prompt.chunks:
                start = span.start - len(context) + shift
                [(k, v)] = engine.fill(context, [prompt.tokens_of(span)], self._length + shift, start)
                kv.k[:, :, span.start : span.end] = k.transpose(0, 1)
                kv.v[:, :, span.start : span.end] = v.transpose(0, 1)
            return self._forward(list(prompt.fresh_positions()), kv, shift)

    @cached_property
    def _filled(self) -> list[KV]:
        chunks = [self._prompt.tokens_of(span) for span in self._prompt.chunks]
        context, sink = self._context, None
        if self._is_sink_placed:
            [sink] = self._engine.fill((), [context], self._length)
            context = ()
        return self._engine.fill(context, chunks, self._length, sink=sink)

    def _moved_kv(self, form: KVFormat) -> RequestKV:
        kv = self._empty_kv()
        for span, filled in zip(self._prompt.chunks, self._filled, strict=True):
            entry = trial_entry(self._prompt.tokens_of(span), self._context, PackedKV.of(*filled, form))
            self._engine.remap(entry, kv, span.start, self._length)
        return kv

    def _empty_kv(self) -> RequestKV:
        return RequestKV(self._engine.format, self._length, self._engine.model.device)

    def _forward(self, positions: Sequence[int], kv: RequestKV, shift: int = 0) -> torch.Tensor:
        tokens = [self._prompt.token_ids[position] for position in positions]
        return self._engine.forward(tokens, positions, kv, self._length, len(self._prompt.question), shift)
