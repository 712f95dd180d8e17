"""The model as its own teacher and student: a full prefill, and the same prompt assembled from reused chunks.

Everything runs through the model's own forward and the engine's attention plans. The fill, the move to another
position and the pass over reused KV are differentiated, so gradients reach the sink that chunks were filled after.
Several prompts are computed at a time, each padded at its end.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.rotation import CosSin, rotated, rotation_between
from kvmosaic.engines.chunk_cache import KV
from kvmosaic.engines.hf.attention import AttentionPlan, active_plan
from kvmosaic.engines.hf.model import HFModel
from kvmosaic.engines.hf.request_kv import CapturedKV, PositionedCache
from kvmosaic.engines.hf.sampling import stop_ids
from kvmosaic.tune.base import TrainingPrompt

PADDED = 2.0
"""Maximum ratio of the longest to the shortest chunk of a forward."""


class GraftedKV(PositionedCache):
    """The reused KV of a batch of prompts, in which a forward replaces the rows that it computes."""

    def __init__(self, grafts: Sequence[KV], positions: torch.Tensor) -> None:
        """``grafts``: by layer, K ``[batch, heads, length, k_dim]`` and V ``[…, v_dim]``; ``positions``: positions of
        the rows that are computed, ``[batch, rows]``."""
        super().__init__()
        self._grafts = grafts
        self._positions = positions[:, None, :, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        k, v = (
            graft.scatter(2, self._positions.expand_as(rows), rows)
            for graft, rows in zip(self._grafts[layer_idx], (key_states, value_states), strict=True)
        )
        return k, v


class GrowingKV(PositionedCache):
    """The KV of a batch of sequences that grow token by token."""

    def __init__(self, kv_format: KVFormat, batch: int, capacity: int, device: torch.device) -> None:
        super().__init__()
        shape = (kv_format.layers, batch, kv_format.heads, capacity)
        self._k = torch.zeros(*shape, kv_format.k_dim, dtype=kv_format.dtype, device=device)
        self._v = torch.zeros(*shape, kv_format.v_dim, dtype=kv_format.dtype, device=device)
        self.positions = torch.empty(0, dtype=torch.long, device=device)
        """Positions of the rows of the next forward, ``[batch, rows]``."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        where = self.positions[:, None, :, None]
        k, v = self._k[layer_idx], self._v[layer_idx]
        k.scatter_(2, where.expand_as(key_states), key_states)
        v.scatter_(2, where.expand_as(value_states), value_states)
        return k, v


class Distillation:
    """Compares a model's predictions for prompts with reused chunks to those after a full prefill."""

    def __init__(self, engine: HFModel) -> None:
        self._engine = engine
        self._model = engine.model
        self._device = engine.model.device

    def divergence(
        self, prompts: Sequence[TrainingPrompt], sink: KV, recomputed: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """KL divergence in nats from the full prefill after each compared token, ``[compared]`` for each prompt, with
        chunks filled after ``sink``, K ``[heads, layers, tokens, k_dim]`` and V. ``recomputed``: for each
        prompt, positions in chunks that are recomputed with attention to everything before them."""
        with torch.no_grad():
            wanted = self._teacher(prompts).float().log_softmax(-1)
        said = self._student(prompts, sink, recomputed).float().log_softmax(-1)
        divergence = functional.kl_div(said, wanted, reduction="none", log_target=True).sum(-1)
        return list(divergence.split([len(prompt.compared) for prompt in prompts]))

    @torch.no_grad()
    def answered(self, prompts: Sequence[TrainingPrompt], most: int) -> list[TrainingPrompt]:
        """The prompts with the model's own answers after a full prefill: the most likely tokens, at most ``most``."""
        lengths = torch.tensor([len(prompt.tokens) for prompt in prompts], device=self._device)
        capacity = int(lengths.max()) + most + 1
        padding = capacity - 1  # padding is written behind all answers
        kv = GrowingKV(self._engine.format, len(prompts), capacity, self._device)
        ids = self._padded([prompt.tokens for prompt in prompts])
        where = self._padded([range(len(prompt.tokens)) for prompt in prompts], padding)
        rows = [range(len(prompt.tokens) - 1, len(prompt.tokens)) for prompt in prompts]
        said = []
        for step in range(most):
            kv.positions = where
            plan = AttentionPlan(where, capacity)
            logits = self._logits(ids, where.masked_fill(where == padding, 0), kv, plan, rows)
            ids = logits.argmax(-1)[:, None]
            said.append(ids)
            where, rows = (lengths + step)[:, None], [range(1)] * len(prompts)
        ends = stop_ids(self._model)
        answers = torch.cat(said, 1).tolist()
        return [prompt.answered(_until(ends, answer)) for prompt, answer in zip(prompts, answers, strict=True)]

    def _teacher(self, prompts: Sequence[TrainingPrompt]) -> torch.Tensor:
        """Logits ``[compared tokens of all prompts, vocab]``."""
        ids = self._padded([prompt.tokens for prompt in prompts])
        places = torch.arange(ids.shape[1], device=self._device)
        rows = [prompt.compared.positions for prompt in prompts]
        return self._logits(ids, places[None].expand_as(ids), CapturedKV(), AttentionPlan(places, len(places)), rows)

    def _student(
        self, prompts: Sequence[TrainingPrompt], sink: KV, recomputed: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Logits ``[compared tokens of all prompts, vocab]``, from reused chunks."""
        length = max(len(prompt.tokens) for prompt in prompts)
        computed = [_computed(prompt, more) for prompt, more in zip(prompts, recomputed, strict=True)]
        # Padding rows are written behind all prompts, where no token attends to them.
        where = self._padded(computed, length)
        tokens = [[prompt.tokens[at] for at in places] for prompt, places in zip(prompts, computed, strict=True)]
        rows = []
        for prompt, places in zip(prompts, computed, strict=True):
            first = places.index(prompt.compared.start)
            rows.append(range(first, first + len(prompt.compared)))
        cache = GraftedKV(self._grafts(prompts, sink, length + 1), where)
        plan = AttentionPlan(where, length + 1)
        return self._logits(self._padded(tokens), where.masked_fill(where == length, 0), cache, plan, rows)

    def _grafts(self, prompts: Sequence[TrainingPrompt], sink: KV, length: int) -> list[KV]:
        """Reused KV of all prompts, by layer: K ``[prompts, heads, length, k_dim]`` and V. KV outside chunks is
        arbitrary and not used."""
        before = sink[0].shape[2]
        spans = [(row, span) for row, prompt in enumerate(prompts) for span in prompt.chunks]
        filled, begins = self._fill([prompts[row].tokens[span.start : span.end] for row, span in spans], sink)
        source, old, new = (torch.zeros(len(prompts), length, dtype=torch.long) for _ in range(3))
        for (row, span), begin in zip(spans, begins, strict=True):
            inside, offsets = slice(span.start, span.end), torch.arange(len(span))
            source[row, inside] = begin + offsets
            old[row, inside] = before + offsets
            new[row, inside] = span.start + offsets
        turns = self._turns(old, new)
        flat = source.flatten().to(self._device)
        grafts = []
        for layer, parts in enumerate(filled):
            # [heads, tokens, dim] -> [prompts, heads, length, dim]
            moved = {
                name: part[:, flat].unflatten(1, source.shape).transpose(0, 1)
                for name, part in zip(("k", "v"), parts, strict=True)
            }
            rotary = self._engine.rotary[layer]
            if rotary is not None:
                part = rotary.columns.part
                moved[part] = rotated(moved[part], turns[rotary.table], rotary.columns)
            grafts.append((moved["k"], moved["v"]))
        return grafts

    def _fill(self, chunks: Sequence[Sequence[int]], sink: KV) -> tuple[list[KV], list[int]]:
        """KV of chunks, each alone after the sink: by layer, K ``[heads, tokens, k_dim]`` and V; and the index at
        which each chunk begins."""
        before, dtype = sink[0].shape[2], self._engine.format.dtype
        cast = sink[0].to(dtype), sink[1].to(dtype)
        parts: list[list[KV]] = [[] for _ in range(self._engine.format.layers)]
        begins, total = [0] * len(chunks), 0
        for group in _alike(chunks):
            ids = self._padded([chunks[index] for index in group])
            places = torch.arange(before, before + ids.shape[1], device=self._device)
            captured = CapturedKV(cast)
            plan = AttentionPlan(places, before + ids.shape[1])
            self._logits(ids, places[None].expand_as(ids), captured, plan, [range(1)])
            for layer, (k, v) in captured.captured.items():
                # [chunks, heads, width, dim] -> [heads, tokens, dim]
                parts[layer].append((k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)))
            for row, index in enumerate(group):
                begins[index] = total + row * ids.shape[1]
            total += ids.numel()
        return [(torch.cat([k for k, _ in layer], 1), torch.cat([v for _, v in layer], 1)) for layer in parts], begins

    def _turns(self, old: torch.Tensor, new: torch.Tensor) -> dict[Any, CosSin]:
        """By rotary table: the rotations from old to new positions, ``[prompts, 1, length, pairs]`` each."""
        length = int(new.max()) + 1
        turns = {}
        for table in dict.fromkeys(rotary.table for rotary in self._engine.rotary if rotary):
            rows = (table.rows(places.flatten().tolist(), length) for places in (old, new))
            turn = rotation_between(*rows)
            turns[table] = CosSin(*(part.unflatten(0, old.shape)[:, None] for part in turn))
        return turns

    def _logits(
        self,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: PositionedCache,
        plan: AttentionPlan,
        rows: Sequence[range],
    ) -> torch.Tensor:
        """Logits ``[rows of all sequences, vocab]`` of some rows of each sequence, because a vocabulary is large."""
        width = ids.shape[1]
        wanted = [index * width + row for index, each in enumerate(rows) for row in each]
        with active_plan(plan), _only(self._model, torch.tensor(wanted, device=self._device)):
            return self._model(
                input_ids=ids, position_ids=position_ids, past_key_values=cache, use_cache=True
            ).logits[0]

    def _padded(self, sequences: Sequence[Sequence[int]], padding: int = 0) -> torch.Tensor:
        tensors = [torch.tensor(sequence) for sequence in sequences]
        return pad_sequence(tensors, batch_first=True, padding_value=padding).to(self._device)


def _alike(chunks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of chunks, grouped by similar length to keep padding small."""
    groups: list[list[int]] = []
    for index in sorted(range(len(chunks)), key=lambda index: len(chunks[index])):
        if groups and len(chunks[index]) <= PADDED * len(chunks[groups[-1][0]]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _until(ends: Collection[int], tokens: Sequence[int]) -> Sequence[int]:
    """The tokens up to the first one that ends an answer."""
    return tokens[: next((index for index, token in enumerate(tokens, 1) if token in ends), len(tokens))]


def _computed(prompt: TrainingPrompt, more: Sequence[int]) -> list[int]:
    """Positions of a prompt that the student computes."""
    inside = {position for span in prompt.chunks for position in span.positions}
    return sorted({*range(len(prompt.tokens))} - inside | {*more})


@contextmanager
def _only(model: PreTrainedModel, rows: torch.Tensor) -> Iterator[None]:
    """Pass only these rows of a batch to the model's output layer, as one sequence."""

    def select(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].flatten(0, 1)[rows][None], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
