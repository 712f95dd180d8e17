"""The expected answers, from transformers and from the embedded engine, in float32, with the same weights.

Every token of an answer is checked, given those before it. A token of an exact answer has to be that of the model
alone, without cache, connector or vLLM. For an approximate answer, the reused tokens of its prompt are known. The
embedded engine computes these chunks alone, moves them into place, and computes everything else over them.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmosaic.blend import policy_named
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.hf.request_kv import RequestKV
from kvmosaic.hf import LLM
from tests.soak.inside import Begun
from tests.soak.session import Answer
from tests.soak.traffic import SEPARATOR

TOLERANCE = 2e-3
"""Maximum difference of log-probabilities that were summed in another order."""


class Reference:
    """Decides whether answers are right."""

    def __init__(self, folder: str | Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._engines: dict[str, LLM] = {}

    def problem(self, answer: Answer, sink: str) -> tuple[str, str | None]:
        """How the answer was checked (``exact``, ``embedded engine`` or ``undecided``), and its problem, if any."""
        if answer.chunks is None or answer.ratio == 1 or not any(begun.reused.any() for begun in answer.begins):
            return "exact", _differs(answer, self._left_to_itself(answer))
        if answer.policy.startswith("kv-deviation") and answer.ratio > 0:
            return self._deviating(answer, sink)
        ends = [*(begun.outputs for begun in answer.begins[1:]), len(answer.answer)]
        for begun, end in zip(answer.begins, ends, strict=True):
            if end == begun.outputs:
                continue
            if _is_unclear(answer, begun):
                return "undecided", None
            problem = _differs(answer, self._mixed(answer, begun, sink), begun.outputs, end)
            if problem is not None:
                return "embedded engine", f"{problem}; chunks {_shares(answer, begun.reused)}"
        return "embedded engine", None

    def _left_to_itself(self, answer: Answer) -> torch.Tensor:
        """Logits ``[answer, vocab]``."""
        ids = torch.tensor([[*answer.tokens, *answer.answer[:-1]]])
        with torch.inference_mode():
            return self._model(input_ids=ids, use_cache=False, logits_to_keep=len(answer.answer)).logits[0]

    def _mixed(self, answer: Answer, begun: Begun, sink: str) -> torch.Tensor:
        """Logits ``[answer, vocab]`` where some tokens are reused and all others computed over them. Those that were
        computed before a policy chose tokens have seen the chunks behind the load's start as they are stored."""
        llm, prompt = self._engine(sink), _prompt(answer)
        everything = [*answer.tokens, *answer.answer[:-1]]
        length, known = len(everything), len(begun.reused)
        last = len(prompt.token_ids) - 1
        is_computed, early = np.ones(length, dtype=bool), np.full(length, -1)
        is_computed[:known], early[:known] = ~begun.reused, begun.early
        with llm.engine.session():
            kv = RequestKV(llm.engine.format, length, llm.model.device)
            spans = [span for span in prompt.chunks if not is_computed[span.start : span.end].all()]
            chunks = [prompt.tokens_of(span) for span in spans]
            context = llm.chunk_cache.context_of(prompt)
            for span, item in zip(spans, llm.chunk_cache.find_or_fill(chunks, context, length), strict=True):
                llm.engine.remap(item.entry, kv, span.start, length)
            found = torch.full((len(answer.answer), llm.model.config.vocab_size), torch.nan)
            is_late, is_fresh, done = is_computed & (early < 0), ~_inside(spans, length), 0
            for start in np.unique(early[early >= 0]).tolist():
                end = np.flatnonzero(early == start)[-1] + 1
                # A chunk that was missing then may be stored now, and placed behind what the prefix cache has of it.
                for mask, first, stop in ((is_late, done, start), (is_fresh | (early == start), start, end)):
                    positions = first + np.flatnonzero(mask[first:stop])
                    if len(positions):
                        llm.engine.forward(
                            [everything[at] for at in positions], positions.tolist(), kv, length, last=1
                        )
                done = start
            positions = done + np.flatnonzero(is_late[done:])
            tokens = [everything[at] for at in positions]
            count = int((positions >= last).sum())
            logits = llm.engine.forward(tokens, positions.tolist(), kv, length, last=max(1, count))
            if count:
                found[positions[-count:] - last] = logits
        return found

    def _deviating(self, answer: Answer, sink: str) -> tuple[str, str | None]:
        """This policy leaves the KV that it computed for its choice in the lower layers, so the whole choice is
        repeated. Deviations may be nearly equal. Then another choice is as good, and a difference proves nothing."""
        llm, prompt = self._engine(sink), _prompt(answer)
        [begun, *more] = answer.begins
        inside = {at for span in prompt.chunks for at in range(span.start, span.end)}
        computed = {at for at in inside if at >= len(begun.reused) or not begun.reused[at]}
        with llm.engine.session():
            assembled = llm.assemble(prompt, answer.ratio, len(answer.answer), policy_named(answer.policy))
            if more or set(assembled.recomputed) != computed:
                return "undecided", None
            logits, so_far = [assembled.logits], list(answer.tokens)
            for token in answer.answer[:-1]:
                so_far.append(token)
                logits.append(assembled.step(so_far))
        return "embedded engine", _differs(answer, torch.stack(logits))

    def _engine(self, sink: str) -> LLM:
        if sink not in self._engines:
            settings = {"enable_chunk_cache": True, "miss_policy": "fill-first", "sink_prefix": sink}
            settings |= {"chunk_separator": SEPARATOR}  # it is also in the sink prefix
            self._engines[sink] = LLM(self._model, self._tokenizer, host_memory="256MiB", **settings)
        return self._engines[sink]


def _prompt(answer: Answer) -> ChunkedPrompt:
    assert answer.chunks is not None
    return ChunkedPrompt(tuple(answer.tokens), tuple(Span(*chunk) for chunk in answer.chunks))


def _inside(spans: Sequence[Span], length: int) -> np.ndarray:
    """Which of ``length`` tokens are in ``spans``, ``[tokens]`` bool."""
    inside = np.zeros(length, dtype=bool)
    for span in spans:
        inside[span.start : span.end] = True
    return inside


def _is_unclear(answer: Answer, begun: Begun) -> bool:
    """Whether tokens have seen a chunk before a policy chose tokens, of which nothing is left to tell whether the
    chunk was reused then."""
    starts = np.unique(begun.early[begun.early >= 0]).tolist()
    for start, following in pairwise([*starts, len(begun.early)]):
        is_early = begun.early == start
        last = np.flatnonzero(is_early)[-1]
        is_told = begun.reused | is_early
        for span in _prompt(answer).chunks:
            part = range(max(span.start, start), min(span.end, following))
            if part and part[0] <= last and not is_told[part.start : part.stop].any():
                return True
    return False


def _shares(answer: Answer, mask: np.ndarray) -> str:
    """Share of each chunk that was reused."""
    spans = _prompt(answer).chunks
    return ", ".join(f"{span.start}-{span.end}: {int(mask[span.start : span.end].sum())}" for span in spans)


def _differs(answer: Answer, logits: torch.Tensor, first: int = 0, end: int | None = None) -> str | None:
    """The token, from ``first`` to before ``end``, that is not the likeliest, or whose probability differs from the
    reported one."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.max(-1).values
    for index in range(first, len(answer.answer) if end is None else end):
        token, said = answer.answer[index], answer.logprobs[index]
        ours = float(logprobs[index, token])
        if not (float(best[index]) - ours <= TOLERANCE and abs(said - ours) <= TOLERANCE):
            return (
                f"token {index} of {len(answer.answer)}: {token} at {said:.4f}, which has {ours:.4f}; "
                f"the likeliest has {float(best[index]):.4f}"
            )
    return None
