"""The start-up gate: reuse is compared with what it has to equal, before anybody's prompt depends on it.

Two things are exact by definition, whatever the model, its weights and the settings: a prompt assembled from chunks
whose tokens are then all recomputed is a full prefill, and a chunk moved into place is the chunk computed there.
How far reuse *without* recomputing may be from a full prefill is no such thing: it depends on the model and on the
documents, and keys left unturned can come out nearer than right ones. That is measured by ``calibrate``, not here.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey, content_hash
from kvmosaic.core.learned_sink import witness_tokens
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.core.window import WHOLE, WindowTails

SYSTEM_TOKENS, CHUNK_TOKENS, QUESTION_TOKENS = 33, (17, 22), 16
"""Sizes of the prompt's parts. What stands before chunks is long enough that keys turn far."""
CONTEXT_TOKENS = 16
"""Maximum tokens of the sink prefix that chunks are computed after: more would only cost time."""
SHIFT = 5
"""Rounding is measured by what it does when all positions are this much higher: exact numbers would not change."""
ROUNDING_FACTOR = 2.5
"""Most that an error may be, in units of that. Right ones are at 0.6 to 1.2, keys not turned at 6 to 12."""
SMALL_EXACT, SMALL_HALF = 1e-3, 3e-2
"""Errors below this, in single and in half precision, are not compared with rounding. Keys not turned give 1e-1 and
above; in half precision the experts that a token is sent to may change for no better reason than luck."""
LAST_FACTOR = 10
"""Maximum error of the last token in half precision, in units of the mean over all tokens."""
ATTEMPTS = 3
"""Number of prompts that have to fail: with a mixture of experts, one may by chance."""
OFF = (
    "the chunk cache is off, every request is prefilled as a whole: %s; "
    "please report this. self_test=false would use the cache nevertheless, at the risk of wrong answers"
)
"""The log line of an engine that failed."""


class Trial(Protocol):
    """An engine and the prompt it is tried with. Each method computes the prompt in its own way and returns what the
    model makes of the question's tokens, logits or last hidden states: ``[question tokens, width]``."""

    def prefill(self, shift: int) -> torch.Tensor:
        """Everything computed by the engine itself, at positions ``shift`` higher."""
        ...

    def recomputed(self) -> torch.Tensor:
        """Chunks filled and moved into place, then every token recomputed, in pieces."""
        ...

    def moved(self) -> torch.Tensor:
        """Chunks filled and moved into place, all other tokens computed."""
        ...

    def in_place(self, shift: int) -> torch.Tensor:
        """Chunks computed alone, but at their places in the prompt; all other tokens computed. All positions are
        ``shift`` higher."""
        ...


def trial_sink(setting: str, sink: Sequence[int], vocabulary: int, *, is_placed: bool) -> tuple[int, ...]:
    """What a trial's chunks are computed after, by the setting ``chunk_context``: the first tokens of its sink.
    A learned one is placed and has no tokens, so others take their place. ``vocabulary``: number of token ids."""
    if setting == "system":
        return ()
    return tuple((witness_tokens(vocabulary) if is_placed else sink)[:CONTEXT_TOKENS])


def trial_prompts(context_tokens: int, vocabulary: int, limit: int | None) -> list[ChunkedPrompt]:
    """Prompts of random tokens for chunks that are computed after ``context_tokens`` others. With :data:`SHIFT` they
    stay within ``limit`` positions; none when those are too few, as they then are for any request."""
    sizes = (SYSTEM_TOKENS, *CHUNK_TOKENS, QUESTION_TOKENS)
    room = sum(sizes) if limit is None else min(sum(sizes), limit - SHIFT - context_tokens)
    system, *chunks, question = (size * room // sum(sizes) for size in sizes)
    if min(system, *chunks, question) < 1:
        return []
    # As far in as a chunk's context is long: computed in place, it has to fit before the chunk.
    ends = [context_tokens + system]
    for size in chunks:
        ends.append(ends[-1] + size)
    rng = random.Random(0)
    tokens = (tuple(rng.randrange(vocabulary) for _ in range(ends[-1] + question)) for _ in range(ATTEMPTS))
    return [ChunkedPrompt(each, tuple(map(Span, ends, ends[1:]))) for each in tokens]


def trial_entry(
    tokens: tuple[int, ...],
    context: tuple[int, ...],
    kv: tuple[torch.Tensor, torch.Tensor],
    tails: WindowTails = WHOLE,
) -> ChunkKV:
    """An entry that no store will see, of K ``[heads, layers, tokens, k_dim]`` and V ``[…, v_dim]``."""
    key = ChunkKey(content_hash(tokens, context), len(tokens), "self-test", "self-test", "self-test")
    return ChunkKV.from_kv(key, tokens, context, *kv, tails)


def failure(trials: Iterable[Trial], dtype: torch.dtype, ranks: int = 1) -> str | None:
    """Why chunks must not be reused, in one line; ``None`` when one of the trials goes well: what is broken fails in
    all of them. ``dtype`` is the model's. An exception is a reason, too, unless other ranks are taking part: they
    would wait for ever for what this one does not say, so it is raised."""
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
    return _judge("a prompt of moved chunks", "one of chunks computed there", trial.moved(), trial.in_place, dtype)


def _judge(
    ours: str, theirs: str, tried: torch.Tensor, wanted: Callable[[int], torch.Tensor], dtype: torch.dtype
) -> str | None:
    """Compare what was tried with what is wanted: outputs ``[tokens, width]`` at positions so much higher."""
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
    """Relative difference of two outputs ``[tokens, width]``; not a number if either has one that is not.

    Of the worst token where numbers are ``is_exact``. In half precision, the geometric mean over tokens, which one
    that was sent to other experts by a rounding error does not dominate; but the last token, on which the answer
    depends, must not be far off."""
    a, b = (x.float() - x.float().mean(-1, keepdim=True) for x in (ours, theirs))
    relative = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-30)
    if is_exact:
        return float(relative.max())
    return float(torch.maximum(relative.clamp(min=1e-9).log().mean().exp(), relative[-1] / LAST_FACTOR))
