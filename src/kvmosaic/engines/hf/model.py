"""A transformers model as the chunk cache needs it: sparse forward, fill, remap."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache

import torch
from transformers import Cache, PreTrainedModel

from kvmosaic.blend.base import Selection
from kvmosaic.core.entry import VIRTUAL_POS_START, ChunkKV
from kvmosaic.core.errors import UnsupportedModelError
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.key import format_fingerprint
from kvmosaic.core.learned_sink import witness_tokens
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.chunk_cache import KV
from kvmosaic.engines.hf.attention import AttentionPlan, Observer, active_plan, exclusive, positional_attention
from kvmosaic.engines.hf.measure import measure
from kvmosaic.engines.hf.narrowing import Narrowing, decoder_layers
from kvmosaic.engines.hf.request_kv import CapturedKV, RequestKV
from kvmosaic.engines.hf.rotary import find_tables, regime_of, rope_switches
from kvmosaic.engines.hf.weights import HFWeights
from kvmosaic.engines.identity import config_identity
from kvmosaic.engines.rotary import turns_for
from kvmosaic.kernels.remap import remap

FILL_BATCH_TOKENS = 4096
"""Maximum tokens of one fill forward, including padding."""


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest sequence the model takes, in tokens; ``None`` if it does not say."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if limit is not None and rope.get("rope_type") == "dynamic":
        return int(limit * rope["factor"])
    return limit


class _SeenEnough(Exception):
    """Ends the forward of a probe after the last layer it needs."""


class HFModel:
    """Wraps a causal LM. Construction measures what it caches and how keys turn, and raises
    :class:`UnsupportedModelError` if they cannot be reused. The self-test checks the results of reuse."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.max_positions = max_positions(model)
        self._tables = find_tables(model, model.dtype)
        self._regime = lru_cache(maxsize=4096)(lambda length: regime_of(self._tables, length))
        attention = model.config.get_text_config()._attn_implementation
        with self.session():
            self.format, self.rotary = measure(model, self._tables, self._capture, self.max_positions)
        self._weights = HFWeights(model)
        # All of the configuration: a window or a norm's epsilon changes KV as much as a weight does.
        config = model.config.get_text_config().to_dict()
        self._identity: dict[str, object] = {
            "weights": self._weights.digest,
            "config": config_identity(config),
            "attention": attention,
            "format": self.format,
            "columns": [rotary.columns if rotary else None for rotary in self.rotary],
        }

    @property
    def weights(self) -> str:
        """Digest of the weights at the last check."""
        return self._weights.digest

    @property
    def switches_tables(self) -> bool:
        """Whether short and long prompts have different rotary tables (longrope)."""
        return any(table.may_switch for table in self._tables)

    @property
    def share(self) -> HeadShare:
        """All heads: this engine has one rank."""
        return HeadShare.of_rank(0, 1, self.format.heads, self.format.layers)

    @contextmanager
    def session(self, gradients: bool = False) -> Iterator[None]:
        """Every forward of one request happens inside a session; outside, the model is unchanged. With ``gradients``,
        the results can be differentiated."""
        with positional_attention(self.model), torch.inference_mode(not gradients):
            training = self.model.training
            self.model.eval()  # with dropout, wrong KV would be stored
            for table in self._tables:
                table.reset()
            try:
                yield
            finally:
                self.model.train(training)

    def fingerprint(self, length: int) -> str | None:
        """Digest of everything that KV depends on besides tokens: the configuration, the weights at the last check,
        and the rotary tables for prompts of ``length`` tokens. ``None`` if those are valid for one length only."""
        regime = self._regime(length)
        return None if regime is None else format_fingerprint(regime=regime, **self._identity)

    def notice_weights(self) -> None:
        """Check whether the weights have changed. To be called before keys are made, which depend on them."""
        if self._weights.have_changed():
            self._identity["weights"] = self._weights.digest

    def plain_logits(self, tokens: Sequence[int], last: int, shift: int) -> torch.Tensor:
        """Logits ``[last, vocab]`` of the model on its own, with positions from ``shift`` on."""
        with exclusive, torch.inference_mode():
            for table in self._tables:
                table.reset()
            ids = torch.tensor([list(tokens)], device=self.model.device)
            positions = torch.arange(shift, shift + len(tokens), device=self.model.device)
            options = {"position_ids": positions[None], "use_cache": False, "logits_to_keep": last}
            return self.model(input_ids=ids, **options).logits[0]

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        kv: RequestKV,
        length: int,
        last: int = 1,
        shift: int = 0,
    ) -> torch.Tensor:
        """The sparse forward: compute the tokens at ``positions`` (ascending) of a sequence of ``length``
        tokens whose other KV is already in ``kv``. Returns the logits ``[last, vocab]`` after the last of them.
        The positions that the model gets are ``shift`` higher."""
        where = torch.tensor(list(positions), device=self.model.device)
        kv.expect(where, length)
        return self._run([tokens], where[None] + shift, kv, AttentionPlan(where, length), last)[0]

    def blend(
        self, prompt: ChunkedPrompt, selection: Selection, kv: RequestKV, length: int, last: int = 1
    ) -> torch.Tensor:
        """Compute the fresh tokens of ``prompt`` and those of ``selection``, in one pass; chunks' KV is in ``kv``.
        Returns the logits ``[last, vocab]`` after the last tokens."""
        fresh = set(prompt.fresh_positions())
        positions = sorted(fresh.union(selection.positions))
        tokens = [prompt.token_ids[position] for position in positions]
        if not selection.checks:
            return self.forward(tokens, positions, kv, length, last)
        where = torch.tensor(positions, device=self.model.device)
        kv.expect(where, length)
        plan = AttentionPlan(where, length)
        lasting = torch.tensor([position in fresh for position in positions], device=self.model.device)
        with Narrowing(selection.checks, lasting, plan, kv).active(decoder_layers(self.model, self.format.layers)):
            return self._run([tokens], where[None], kv, plan, last)[0]

    def probe(
        self,
        prompt: ChunkedPrompt,
        positions: Sequence[int],
        kv: RequestKV,
        length: int,
        layer: int,
        observe: Observer | None = None,
    ) -> None:
        """Compute the tokens at ``positions`` as :meth:`forward` does, but only up to the KV of ``layer``."""
        where = torch.tensor(list(positions), device=self.model.device)
        kv.expect(where, length)
        plan = AttentionPlan(where, length)

        def stop(index: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
            if observe is not None:
                observe(index, q, k, scale)
            if index == layer:
                raise _SeenEnough

        plan.observe = stop
        with suppress(_SeenEnough):
            self._run([[prompt.token_ids[position] for position in positions]], where[None], kv, plan)

    def step(self, so_far: Sequence[int], kv: RequestKV) -> torch.Tensor:
        """Decode: compute the last of ``so_far``. Returns the logits ``[vocab]`` after it."""
        length = len(so_far)
        # When longrope switches its table, keys turned by the old one are invalid: recompute everything.
        start = 0 if rope_switches(self._tables, length) else length - 1
        return self.forward(so_far[start:], range(start, length), kv, length)[-1]

    def fill(
        self,
        context: Sequence[int],
        chunks: Sequence[Sequence[int]],
        length: int,
        start: int = VIRTUAL_POS_START,
        sink: KV | None = None,
    ) -> list[KV]:
        """KV of each chunk, computed alone after ``context`` with the rotary tables of a prompt of ``length`` tokens.
        Chunks of similar length share a forward. The KV is canonical with the default ``start``, the first position.
        With a learned ``sink`` the context is empty, and chunks come after the sink."""
        results: dict[int, KV] = {}
        batch: list[int] = []

        def run_batch() -> None:
            captured = self._capture([[*context, *chunks[index]] for index in batch], start, length, sink)
            for row, index in enumerate(batch):
                results[index] = captured.row(row, slice(len(context), len(context) + len(chunks[index])))
            batch.clear()

        with self.session():
            for index in sorted(range(len(chunks)), key=lambda index: len(chunks[index])):
                if batch and (len(context) + len(chunks[index])) * (len(batch) + 1) > FILL_BATCH_TOKENS:
                    run_batch()
                batch.append(index)
            run_batch()
        return [results[index] for index in range(len(chunks))]

    def witness(self) -> torch.Tensor:
        """Values that distinguish models, ``[heads, tokens, v_dim]``; see :class:`LearnedSink`."""
        tokens = witness_tokens(self.model.config.get_text_config().vocab_size)
        [(_, v)] = self.fill((), [tokens], len(tokens))
        return v[:, -1]

    def remap(self, entry: ChunkKV, kv: RequestKV, position: int, length: int) -> None:
        """Place ``entry`` at ``position`` of a prompt of ``length`` tokens."""
        remap(entry, kv.k, kv.v, position, turns_for([(entry, position)], length, self.rotary))

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Layers whose attention reaches every earlier token."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        if kinds is not None:
            return tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")
        window = getattr(config, "sliding_window", None)
        return () if window and window < (self.max_positions or window + 1) else tuple(range(self.format.layers))

    def _run(
        self, rows: Sequence[Sequence[int]], positions: torch.Tensor, cache: Cache, plan: AttentionPlan, last: int = 1
    ) -> torch.Tensor:
        """One forward; ``positions`` is ``[1 or rows, tokens]``. Returns logits ``[rows, last, vocab]``."""
        ids = torch.tensor([list(row) for row in rows], device=self.model.device)
        with active_plan(plan):
            return self.model(
                input_ids=ids,
                position_ids=positions.expand(len(rows), -1),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=last,
            ).logits

    def _capture(self, rows: Sequence[Sequence[int]], start: int, length: int, sink: KV | None = None) -> CapturedKV:
        """Run rows as a batch, each by itself, and record their KV. Positions begin at ``start``; a learned ``sink``
        takes the first ones.

        Rows are padded at the end, where no other token sees the padding. The last padding token has the position
        ``length - 1``: it puts the model's rotary tables into the state they have for a prompt of that length."""
        width = max(map(len, rows)) + 1
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        before = 0 if sink is None else sink[0].shape[2]
        places = torch.arange(before, before + width, device=self.model.device)
        positions = places + start
        positions[-1] = max(length - 1, int(positions[-1]) - 1)
        captured = CapturedKV(sink)
        plan = AttentionPlan(places, before + width)
        self._run(padded, positions[None], captured, plan)
        if plan.calls != len(captured.captured):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not compute its attention through the transformers attention "
                "interface; chunks cannot be kept apart"
            )
        return captured
