"""``LLM``: parse, look up, fill, remap, blend, prefill, decode — for a transformers model in this process."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvmosaic.blend import Policy, choose, policy_named
from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError, UnsupportedModelError
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.messages import conversations, names_for_each
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.hf.chat import ChatPrompt, chat_prompt
from kvmosaic.engines.hf.chunk_cache import HFChunkCache
from kvmosaic.engines.hf.decoding import Assembled, decode
from kvmosaic.engines.hf.loading import load
from kvmosaic.engines.hf.model import HFModel, max_positions
from kvmosaic.engines.hf.plain import plain_generate
from kvmosaic.engines.hf.probe import HFProbe
from kvmosaic.engines.hf.prompts import Prompt, PromptReader, ReadPrompt
from kvmosaic.engines.hf.request_kv import RequestKV
from kvmosaic.engines.hf.sampling import SamplingParams, stop_ids
from kvmosaic.engines.hf.self_test import self_test
from kvmosaic.engines.identity import learned_sink, model_name, sink_of
from kvmosaic.engines.results import ChunkReport, Fallback, RequestOutput, joined
from kvmosaic.engines.self_test import OFF

logger = logging.getLogger(__name__)


class LLM:
    """A causal LM that reuses the KV of documents it has seen.

    ``model`` is a catalog name (``smollm2-135m``), a folder, a hub name, or a loaded model. All other
    settings are those of :class:`ChunkCacheConfig`, which are also read from ``KVMOSAIC_*`` and YAML. If the chunk
    cache cannot work with the model, generation works without it and one warning gives the reason.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        **settings: Any,
    ) -> None:
        name = (model.name_or_path or None) if isinstance(model, PreTrainedModel) else str(model)
        self.config: ChunkCacheConfig = load_config(name, **settings)
        try:
            self._policy = policy_named(self.config.policy)
        except ConfigError as error:
            raise self.config.blame(error) from None
        if isinstance(model, PreTrainedModel):
            self.model = model.eval()
        else:
            self.model, loaded_tokenizer = load(str(model), dtype, device)
            tokenizer = tokenizer or loaded_tokenizer
        self.tokenizer = tokenizer
        separator = self.config.chunk_separator if self.config.enable_chunk_cache else None
        self.parser = ChunkTokenParser(tokenizer, separator, self.config.min_chunk_tokens)
        self.max_positions = max_positions(self.model)
        self._reader = PromptReader(self.parser, self.model.config.get_text_config().vocab_size, self.max_positions)
        self._engine: HFModel | None = None
        self._chunk_cache: HFChunkCache | None = None
        self._off_reason: str | None = Fallback.DISABLED.value
        if self.config.enable_chunk_cache:
            self._start_chunk_cache()
        else:
            logger.info("the chunk cache is off; pass enable_chunk_cache=True to use it")

    def _start_chunk_cache(self) -> None:
        learned = learned_sink(self.config)
        bos = getattr(self.model.config.get_text_config(), "bos_token_id", None)  # as vLLM reads it
        sink = sink_of(self.config, learned, bos, self.tokenizer)
        try:
            self._engine = HFModel(self.model)
        except Exception as error:  # any model can still generate without our cache
            reason = str(error) if isinstance(error, UnsupportedModelError) else f"{type(error).__name__}: {error}"
            self._off_reason = f"unsupported model: {' '.join(reason.split())}"
            logger.warning("the chunk cache is off: %s", self._off_reason)
            return
        try:
            self._policy.check(self._engine.format.layers)
        except ConfigError as error:
            raise self.config.blame(error) from None
        if learned is not None:
            try:
                learned.check(self._engine.format, self._engine.witness(), self._engine.share)
            except ConfigError as error:
                raise self.config.blame(error, "sink_prefix") from None
        self._off_reason = None
        if self.config.self_test:
            after = self.config.chunk_context
            is_int8 = self.config.entry_dtype == "int8"
            self._off_reason = self_test(
                self._engine, sink, after, is_sink_placed=learned is not None, is_int8=is_int8
            )
        if self._off_reason is not None:
            self._engine = None
            logger.error(OFF, self._off_reason)
            return
        known_as = self.model.name_or_path
        name = model_name(known_as) if known_as else f"{type(self.model).__name__}-{self._engine.weights}"
        self._chunk_cache = HFChunkCache(
            self.config,
            name,
            parser=self.parser,
            engine=self._engine,
            sink=sink,
            learned=learned,
            max_positions=self.max_positions,
        )

    @property
    def engine(self) -> HFModel:
        """The model as the chunk cache uses it."""
        if self._engine is None:
            raise ConfigError(f"the chunk cache is off: {self._off_reason}")
        return self._engine

    @property
    def chunk_cache(self) -> HFChunkCache:
        """The chunk cache: ``get_stats()``, ``clear()``, ``warm(documents)``."""
        if self._chunk_cache is None:
            raise ConfigError(f"the chunk cache is off: {self._off_reason}")
        return self._chunk_cache

    def generate(
        self,
        prompts: str | ChunkedPrompt | ChatPrompt | Sequence[Prompt],
        *,
        documents: Sequence[str] | Sequence[Sequence[str]] | None = None,
        max_tokens: int = 128,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        recompute_ratio: float | None = None,
        policy: str | None = None,
        use_chunk_cache: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt, in order. ``use_chunk_cache=False`` is a plain, full prefill.

        ``documents`` are texts that are chunks wherever they occur in a prompt: one list for all prompts, or a list
        for each."""
        params = SamplingParams(max_tokens, temperature, top_p, top_k, repetition_penalty, seed)
        ratio = self.config.recompute_ratio if recompute_ratio is None else recompute_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
            raise ConfigError(f"recompute_ratio={ratio!r}: must be a number between 0 and 1")
        chosen = self._policy if policy is None else policy_named(policy)
        batch = [prompts] if isinstance(prompts, (str, ChunkedPrompt, ChatPrompt)) else list(prompts)
        names = names_for_each(documents, len(batch))
        search = use_chunk_cache and self._off_reason is None
        # A bad prompt is refused before any work is done for the good ones.
        read = [self._reader.read(i, prompt, names[i], max_tokens, search) for i, prompt in enumerate(batch)]
        return [self._answer(prompt, params, chosen, ratio, use_chunk_cache) for prompt in read]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        documents: Sequence[str] | Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, in the model's chat format.

        Besides ``documents``, the text parts of messages, except for the last one of each user message, and tool
        results are chunks, if ``chunk_sources`` includes them. ``options`` are those of :meth:`generate`."""
        talks = conversations(messages)
        names = names_for_each(documents, len(talks))
        sources = self.config.sources
        return self.generate(
            [chat_prompt(self.tokenizer, *parts, sources) for parts in zip(talks, names, strict=True)], **options
        )

    def close(self) -> None:
        """Finish pending writes of the chunk cache."""
        if self._chunk_cache is not None:
            self._chunk_cache.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _answer(
        self,
        read: ReadPrompt,
        params: SamplingParams,
        policy: Policy,
        ratio: float,
        use_chunk_cache: bool,
    ) -> RequestOutput:
        start = time.perf_counter() - read.seconds
        prompt = read.prompt
        reason = self._off_reason if use_chunk_cache else Fallback.DISABLED.value
        if reason is None and prompt.chunks and not self.chunk_cache.serves(len(prompt.token_ids)):
            reason = Fallback.ROPE_LENGTH.value
        assembled: Assembled | None = None
        if prompt.chunks and reason is None:
            with self.engine.session():
                assembled = self.assemble(prompt, ratio, params.max_tokens, policy)
                decoded = decode(self.model, prompt, assembled, params, start)
            if assembled.missing and self.config.miss_policy == "background":
                # After the answer, so that no first token waits for it.
                context = self.chunk_cache.context_of(prompt)
                self.chunk_cache.fill_missing(assembled.missing, context, len(prompt.token_ids))
        else:
            decoded = plain_generate(self.model, prompt.token_ids, params, start)
        tokens_by_status = Counter[str]()
        reports = assembled.reports if assembled else ()
        for report in reports:
            tokens_by_status[report.status] += len(report.span)
        cached, filled = tokens_by_status["cached"], tokens_by_status["filled"]
        return RequestOutput(
            text=self.tokenizer.decode(decoded.tokens, skip_special_tokens=True) if self.tokenizer else "",
            token_ids=tuple(decoded.tokens),
            finish_reason="stop" if decoded.tokens[-1] in stop_ids(self.model) else "length",
            mode="fill" if filled else "reuse" if cached else "plain",
            ttft_ms=decoded.ttft_ms,
            prompt_tokens=len(prompt.token_ids),
            cached_tokens=cached,
            filled_tokens=filled,
            recomputed_tokens=len(assembled.recomputed) if assembled else 0,
            charged_ratio=assembled.charged_ratio if assembled else 0.0,
            prefilled_tokens=len(prompt.token_ids) - cached - filled,
            chunks=reports,
            recomputed=tuple((start, end) for start, end in joined(assembled.recomputed)) if assembled else (),
            probed=assembled.probed if assembled else None,
            absent_documents=read.absent,
            fallback_reason=reason,
        )

    def assemble(self, prompt: ChunkedPrompt, ratio: float, room: int = 0, policy: Policy | None = None) -> Assembled:
        """Assemble the request's KV. Chunks come from the store; all other tokens and those that the policy picks are
        computed in one pass. There is room for ``room`` tokens of the answer. Call it inside ``engine.session()``."""
        engine, cache, length = self.engine, self.chunk_cache, len(prompt.token_ids)
        context = cache.context_of(prompt)
        fitting = [span for span in prompt.chunks if cache.fits(len(span), context, length)]
        found, missing = cache.find([prompt.tokens_of(span) for span in fitting], context, length)
        if self.config.miss_policy == "fill-first":
            found |= cache.fill_missing(missing, context, length)
            missing = {}
        kv = RequestKV(engine.format, length + room, self.model.device)
        reports = {span: ChunkReport(span, "prefilled", None, "too-long") for span in prompt.chunks}
        filled: set[ChunkKey] = set()
        usable = []
        for span in fitting:
            chunk = prompt.tokens_of(span)
            if chunk in missing:
                reports[span] = ChunkReport(span, "prefilled", None, missing[chunk].reason)
                continue
            usable.append(span)
            entry, tier, reason = found[chunk]
            engine.remap(entry, kv, span.start, length)
            if tier is not None:
                reports[span] = ChunkReport(span, "cached", tier, None)
            elif entry.key in filled:
                reports[span] = ChunkReport(span, "cached", "request", None)
            else:
                reports[span] = ChunkReport(span, "filled", None, reason)
                filled.add(entry.key)
        reused = ChunkedPrompt(prompt.token_ids, tuple(usable))
        assembled = HFProbe(reused, prompt.question, engine, kv)
        selection = choose(policy or self._policy, assembled, ratio)
        logits = engine.blend(reused, selection, kv, length)[-1]
        return Assembled(
            logits,
            kv,
            lambda so_far: engine.step(so_far, kv),
            tuple(reports.values()),
            selection.positions,
            assembled.was_probed if usable and 0 < ratio < 1 else None,
            assembled.charged_ratio(selection),
            missing,
        )

    def full_prefill(self, prompt: ChunkedPrompt, room: int = 0) -> Assembled:
        """The result that :meth:`assemble` approximates: all tokens computed, nothing reused or stored."""
        engine, length = self.engine, len(prompt.token_ids)
        kv = RequestKV(engine.format, length + room, self.model.device)
        logits = engine.forward(prompt.token_ids, range(length), kv, length)[-1]
        return Assembled(logits, kv, lambda so_far: engine.step(so_far, kv))
