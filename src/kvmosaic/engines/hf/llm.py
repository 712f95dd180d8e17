"""``LLM``: parse, look up, fill, remap, blend, prefill, decode — for a transformers model in this process."""

import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvmosaic.blend import Policy, choose, policy_named
from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError, PromptError, UnsupportedModelError
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.chunk_cache import Missing
from kvmosaic.engines.hf.chunk_cache import HFChunkCache
from kvmosaic.engines.hf.model import HFModel, max_positions
from kvmosaic.engines.hf.plain import Decoded, plain_generate
from kvmosaic.engines.hf.probe import HFProbe
from kvmosaic.engines.hf.request_kv import RequestKV
from kvmosaic.engines.hf.sampling import Sampler, SamplingParams, stop_ids
from kvmosaic.engines.hf.self_test import self_test
from kvmosaic.engines.identity import model_name, sink_of
from kvmosaic.engines.precision import WHY_FLOAT32, cpu_runs_bfloat16, needs_float32
from kvmosaic.engines.results import ChunkReport, Fallback, RequestOutput
from kvmosaic.engines.self_test import OFF
from kvmosaic.models import resolve

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | ChunkedPrompt


class Assembled(NamedTuple):
    """A prompt ready to decode: logits ``[vocab]`` after it, how to go on, and what became of its chunks."""

    logits: torch.Tensor
    kv: RequestKV
    step: Callable[[Sequence[int]], torch.Tensor]
    """Computes the last of these tokens, all others being cached: logits ``[vocab]`` after it."""
    reports: tuple[ChunkReport, ...] = ()
    recomputed: tuple[int, ...] = ()
    """Positions of chunk tokens that were computed anew."""
    charged_ratio: float = 0.0
    """What that and the choice of them cost, as a share of computing all chunk tokens in all layers."""
    missing: Mapping[tuple[int, ...], Missing] = MappingProxyType({})
    """Chunks that were in no tier and were computed as ordinary text."""


class LLM:
    """A causal LM that reuses the KV of documents it has seen.

    ``model`` is a catalog name (``smollm2-135m``), a folder, a hub name, or a loaded model. All other
    settings are those of :class:`ChunkCacheConfig`; also read from ``KVMOSAIC_*`` and YAML. When the
    chunk cache cannot work with the model, generation works without it and one warning says why.
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
            self.model, loaded_tokenizer = _load(str(model), dtype, device)
            tokenizer = tokenizer or loaded_tokenizer
        self.tokenizer = tokenizer
        separator = self.config.chunk_separator if self.config.enable_chunk_cache else None
        self.parser = ChunkTokenParser(tokenizer, separator, self.config.min_chunk_tokens)
        self.max_positions = max_positions(self.model)
        self._engine: HFModel | None = None
        self._chunk_cache: HFChunkCache | None = None
        self._off_reason: str | None = Fallback.DISABLED.value
        if self.config.enable_chunk_cache:
            self._start_chunk_cache()
        else:
            logger.info("the chunk cache is off; pass enable_chunk_cache=True to use it")

    def _start_chunk_cache(self) -> None:
        sink = sink_of(self.config, self.model.generation_config.bos_token_id, self.tokenizer)
        try:
            self._engine = HFModel(self.model)
        except Exception as error:  # whatever a model does with our cache: it can still generate without
            reason = str(error) if isinstance(error, UnsupportedModelError) else f"{type(error).__name__}: {error}"
            self._off_reason = f"unsupported model: {' '.join(reason.split())}"
            logger.warning("the chunk cache is off: %s", self._off_reason)
            return
        try:
            self._policy.check(self._engine.format.layers)
        except ConfigError as error:
            raise self.config.blame(error) from None
        self._off_reason = self_test(self._engine, sink, self.config.chunk_context) if self.config.self_test else None
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

    def chat_prompt(self, system: str, documents: Sequence[str], question: str) -> str:
        """A prompt of these parts, in the model's chat format when it has one."""
        separator = self.config.chunk_separator
        if separator is None:
            raise ConfigError("chunk_separator is off, and nothing else tells the documents of a text apart; set one")
        body = separator.join(["", *documents, question])
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return f"{system}{body}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": body}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def generate(
        self,
        prompts: str | Sequence[Prompt] | ChunkedPrompt,
        *,
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
        """Answer each prompt, in order. ``use_chunk_cache=False`` is a plain, full prefill."""
        params = SamplingParams(max_tokens, temperature, top_p, top_k, repetition_penalty, seed)
        ratio = self.config.recompute_ratio if recompute_ratio is None else recompute_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
            raise ConfigError(f"recompute_ratio={ratio!r}: must be a number between 0 and 1")
        chosen = self._policy if policy is None else policy_named(policy)
        batch = [prompts] if isinstance(prompts, (str, ChunkedPrompt)) else list(prompts)
        # A bad prompt is refused before any work is done for the good ones.
        parsed = [self._parse(index, prompt, params, use_chunk_cache) for index, prompt in enumerate(batch)]
        return [self._answer(prompt, params, chosen, ratio, use_chunk_cache, seconds) for prompt, seconds in parsed]

    def close(self) -> None:
        """Finish pending writes of the chunk cache."""
        if self._chunk_cache is not None:
            self._chunk_cache.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _parse(
        self, index: int, source: Prompt, params: SamplingParams, use_chunk_cache: bool
    ) -> tuple[ChunkedPrompt, float]:
        """The parsed prompt and the seconds it took, which count towards its TTFT."""
        start = time.perf_counter()
        vocabulary = self.model.config.get_text_config().vocab_size
        if isinstance(source, ChunkedPrompt):
            prompt, tokens = source, list(source.token_ids)
        elif isinstance(source, str):
            tokens = self.parser.encode(source)
        else:
            try:
                if isinstance(source, (bytes, bytearray)):
                    raise TypeError
                tokens = [operator.index(token) for token in source]
            except TypeError:
                raise PromptError(f"prompt {index} must be text, a list of token ids or a ChunkedPrompt") from None
        if not all(0 <= token < vocabulary for token in tokens):
            raise PromptError(f"prompt {index}: token ids must be between 0 and {vocabulary - 1}")
        if not isinstance(source, ChunkedPrompt):
            search = use_chunk_cache and self._off_reason is None
            prompt = self.parser.parse(tokens) if search else ChunkedPrompt(tuple(tokens), ())
        total = len(prompt.token_ids) + params.max_tokens
        if self.max_positions is not None and total > self.max_positions:
            raise PromptError(
                f"prompt {index}: {len(prompt.token_ids)} tokens + max_tokens {params.max_tokens} exceed the "
                f"model's {self.max_positions} positions; shorten one of them"
            )
        return prompt, time.perf_counter() - start

    def _answer(
        self,
        prompt: ChunkedPrompt,
        params: SamplingParams,
        policy: Policy,
        ratio: float,
        use_chunk_cache: bool,
        parse_seconds: float,
    ) -> RequestOutput:
        start = time.perf_counter() - parse_seconds
        reason = self._off_reason if use_chunk_cache else Fallback.DISABLED.value
        if reason is None and prompt.chunks and not self.chunk_cache.serves(len(prompt.token_ids)):
            reason = Fallback.ROPE_LENGTH.value
        assembled: Assembled | None = None
        if prompt.chunks and reason is None:
            with self.engine.session():
                assembled = self.assemble(prompt, ratio, params.max_tokens, policy)
                decoded = self._decode(prompt, assembled, params, start)
            if assembled.missing and self.config.miss_policy == "background":
                # Behind the answer, so that nobody's first token waits for it.
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
            fallback_reason=reason,
        )

    def assemble(self, prompt: ChunkedPrompt, ratio: float, room: int = 0, policy: Policy | None = None) -> Assembled:
        """Put the request's KV together: chunks from the store, then everything else and what the policy picks
        computed in one pass, with ``room`` tokens left for the answer. Call it inside ``engine.session()``."""
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
            assembled.charged_ratio(selection),
            missing,
        )

    def full_prefill(self, prompt: ChunkedPrompt, room: int = 0) -> Assembled:
        """What :meth:`assemble` approximates: all tokens computed, nothing reused or stored."""
        engine, length = self.engine, len(prompt.token_ids)
        kv = RequestKV(engine.format, length + room, self.model.device)
        logits = engine.forward(prompt.token_ids, range(length), kv, length)[-1]
        return Assembled(logits, kv, lambda so_far: engine.step(so_far, kv))

    def _decode(self, prompt: ChunkedPrompt, assembled: Assembled, params: SamplingParams, start: float) -> Decoded:
        """Sample until a stop token or the limit."""
        sampler = Sampler(self.model, params, len(prompt.token_ids))
        stops = stop_ids(self.model)
        so_far = list(prompt.token_ids)
        output: list[int] = []
        logits, ttft_ms = assembled.logits, 0.0
        while True:
            token = sampler.pick(logits, so_far)
            if not output:
                ttft_ms = (time.perf_counter() - start) * 1e3
            output.append(token)
            so_far.append(token)
            if token in stops or len(output) == params.max_tokens:
                return Decoded(output, ttft_ms)
            logits = assembled.step(so_far)


def _load(
    model: str, dtype: str | torch.dtype, device: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = resolve(model)
    try:
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load model {model!r}: {' '.join(str(error).split())[:300]}") from None
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "auto" and place == "cpu" and not cpu_runs_bfloat16():
        network = _in_float32(network)
    return network.to(place).eval(), tokenizer


def _in_float32(network: PreTrainedModel) -> PreTrainedModel:
    own = str(network.dtype).removeprefix("torch.")
    if not needs_float32(own, is_quantized=getattr(network.config, "quantization_config", None) is not None):
        return network
    logger.warning("computing in float32 instead of %s: %s", own, WHY_FLOAT32)
    return network.float()
