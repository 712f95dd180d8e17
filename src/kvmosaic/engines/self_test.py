"""The start-up self-test: reuse is compared with results that it has to equal, before any request depends on it.

Two equalities hold by definition, for every model, weights and settings: a prompt assembled from chunks whose tokens
are then all recomputed equals a full prefill, and a chunk moved into place equals the chunk computed there. The
distance of reuse *without* recomputing from a full prefill is not tested: it depends on the model and on the
documents, and unturned keys can be closer than right ones. ``calibrate`` measures it.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from kvmosaic.core.entry import ChunkKV, PackedKV
from kvmosaic.core.key import ChunkKey, content_hash, marked
from kvmosaic.core.learned_sink import witness_tokens
from kvmosaic.core.prompt import ChunkedPrompt, Span

SYSTEM_TOKENS, CHUNK_TOKENS, QUESTION_TOKENS = 33, (17, 22), 16
"""Sizes of the prompt's parts, in tokens. The part before chunks is long enough that keys turn far."""
CONTEXT_TOKENS = 16
"""Maximum tokens of the sink prefix that chunks are computed after: more would only cost time."""
SHIFT = 5
"""Offset of all positions that rounding is measured with: exact numbers would not change."""
ROUNDING_FACTOR = 2.5
"""Maximum error, in units of the measured rounding. Right results are at 0.6 to 1.2, unturned keys at 6 to 12."""
SMALL_EXACT, SMALL_HALF = 1e-3, 3e-2
"""Errors below this, in single and in half precision, are not compared with rounding. Unturned keys give 1e-1 and
above. In half precision, a token may be routed to other experts by chance."""
SMALL_INT8 = 0.1
"""Maximum error of chunks in 8 bits, against exact ones."""
LAST_FACTOR = 10
"""Maximum error of the last token in half precision, in units of the mean over all tokens."""
ATTEMPTS = 3
"""Number of prompts that have to fail: with a mixture of experts, one may fail by chance."""
OFF = (
    "the chunk cache is off, every request is prefilled as a whole: %s; "
    "please report this. self_test=false would use the cache nevertheless, at the risk of wrong answers"
)
"""The log line of an engine that failed its self-test."""


class Trial(Protocol):
    """An engine and the prompt it is tried with. Each method computes the prompt in its own way and returns the
    model's output for the question's tokens, logits or last hidden states: ``[question tokens, width]``."""

    def prefill(self, shift: int) -> torch.Tensor:
        """Everything computed by the engine itself, at positions ``shift`` higher."""
        ...

    def recomputed(self) -> torch.Tensor:
        """Chunks filled and moved into place, then every token recomputed, in pieces."""
        ...

    def moved(self) -> torch.Tensor:
        """Chunks filled and moved into place, all other tokens computed."""
        ...

    def in_8_bits(self) -> torch.Tensor | None:
        """Like :meth:`moved`, with chunks in 8 bits; ``None`` if the engine does not store them like that."""
        ...

    def in_place(self, shift: int) -> torch.Tensor:
        """Chunks computed alone, but at their positions in the prompt; all other tokens computed. All positions are
        ``shift`` higher."""
        ...


def trial_sink(setting: str, sink: Sequence[int], vocabulary: int, *, is_placed: bool) -> tuple[int, ...]:
    """The tokens that a trial's chunks are computed after, according to the setting ``chunk_context``: the first ones
    of the sink. A learned sink is placed and has no tokens, so other tokens are used. ``vocabulary``: number of token
    ids."""
    if setting == "system":
        return ()
    return tuple((witness_tokens(vocabulary) if is_placed else sink)[:CONTEXT_TOKENS])


def trial_prompts(context_tokens: int, vocabulary: int, limit: int | None) -> list[ChunkedPrompt]:
    """Prompts of random tokens for chunks that are computed after ``context_tokens`` others. With :data:`SHIFT` they
    stay within ``limit`` positions. There are none if that is too few, as it then is for any request."""
    sizes = (SYSTEM_TOKENS, *CHUNK_TOKENS, QUESTION_TOKENS)
    room = sum(sizes) if limit is None else min(sum(sizes), limit - SHIFT - context_tokens)
    system, *chunks, question = (size * room // sum(sizes) for size in sizes)
    if min(system, *chunks, question) < 1:
        return []
    # Chunks start after the length of their context: computed in place, the context has to fit before a chunk.
    ends = [context_tokens + system]
    for size in chunks:
        ends.append(ends[-1] + size)
    rng = random.Random(0)
    tokens = (tuple(rng.randrange(vocabulary) for _ in range(ends[-1] + question)) for _ in range(ATTEMPTS))
    return [ChunkedPrompt(each, tuple(map(Span, ends, ends[1:]))) for each in tokens]


def trial_entry(
    tokens: tuple[int, ...],
    context: tuple[int, ...],
    packed: PackedKV,
) -> ChunkKV:
    """An entry that is never stored."""
    fingerprint = marked("selftest", packed.format.numbers)
    key = ChunkKey(content_hash(tokens, context), len(tokens), "self-test", fingerprint, "self-test")
    return ChunkKV.from_packed(key, tokens, context, packed)


def failure(trials: Iterable[Trial], dtype: torch.dtype, ranks: int = 1) -> str | None:
    """Why chunks must not be reused, in one line; ``None`` when one of the trials succeeds: a real fault fails all of
    them. ``dtype`` is the model's, or that of its KV cache if that has fewer bits. An exception is also a reason.
    With several ``ranks`` it is raised instead, because the other ranks would wait forever for this one."""
    reason = None
    for trial in trials:
        try:
            reason = _fault(trial, dtype)
        except Exception as error:
            if ranks > 1:
                raise
            reason = f"self-test failed: {type(error).__name__}: {' '.join(str(error).split())}"
        if reason is None:
            break
    return reason


def _fault(trial: Trial, dtype: torch.dtype) -> str | None:
    recomputed = _judge("a prompt recomputed in pieces", "a full prefill", trial.recomputed(), trial.prefill, dtype)
    if recomputed is not None:
        return recomputed
    moved = trial.moved()
    misplaced = _judge("a prompt of moved chunks", "one of chunks computed in place", moved, trial.in_place, dtype)
    if misplaced is not None:
        return misplaced
    rough = trial.in_8_bits()
    error = 0.0 if rough is None else _distance(rough, moved, is_exact=False)
    if error <= SMALL_INT8:
        return None
    return (
        f"self-test failed: a prompt of chunks in 8 bits is {error:.2%} off one of exact chunks, of which rounding "
        f"explains no more than {SMALL_INT8:.0%}; entry_dtype=auto stores exact ones"
    )


def _judge(
    ours: str, theirs: str, tried: torch.Tensor, wanted: Callable[[int], torch.Tensor], dtype: torch.dtype
) -> str | None:
    """Compare an output ``[tokens, width]`` with the wanted one, which is a function of a shift of all positions."""
    right, is_exact = wanted(0), dtype.itemsize >= 4
    error, bound = _distance(tried, right, is_exact), SMALL_EXACT if is_exact else SMALL_HALF
    if not error <= bound:
        bound = max(bound, ROUNDING_FACTOR * _distance(wanted(SHIFT), right, is_exact))
    if error <= bound:
        return None
    return (
        f"self-test failed: {ours} is {error:.2%} off {theirs}, of which rounding explains no more than {bound:.2%}"
    )


def _distance(ours: torch.Tensor, theirs: torch.Tensor, is_exact: bool) -> float:
    """Relative difference of two outputs ``[tokens, width]``; NaN if either has a NaN.

    If ``is_exact``, that of the worst token. In half precision, the geometric mean over tokens, which a single token
    that rounding sent to other experts does not dominate. The last token, on which the answer depends, must not be
    far off either."""
    a, b = (x.float() - x.float().mean(-1, keepdim=True) for x in (ours, theirs))
    relative = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-30)
    if is_exact:
        return float(relative.max())
    return float(torch.maximum(relative.clamp(min=1e-9).log().mean().exp(), relative[-1] / LAST_FACTOR))
