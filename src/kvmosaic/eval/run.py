"""The evaluation itself: every cell on every question, compared with a full prefill of the same tokens."""

import time
from collections.abc import Callable

import torch

from kvmosaic.blend import policy_named
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.hf.decoding import Assembled
from kvmosaic.engines.hf.llm import LLM
from kvmosaic.engines.hf.sampling import stop_ids
from kvmosaic.eval.base import Cell
from kvmosaic.eval.metrics import exact_match, first_line, kl_per_token, word_f1
from kvmosaic.eval.plan import FULL_PREFILL, NO_CONTEXT, Plan, Question
from kvmosaic.eval.work_file import Score, WorkFile


def evaluate(llm: LLM, plan: Plan, work: WorkFile, progress: Callable[[int], None] = lambda example: None) -> None:
    """Measure the scores that are not in ``work`` yet, example by example. ``progress`` is called after each example.

    The chunk cache is cleared for each example, so that its chunks are always filled together. A score then depends
    only on its example and cell, not on earlier measurements.
    """
    for index, question in enumerate(plan.questions):
        cells = (FULL_PREFILL, NO_CONTEXT, *plan.cells)
        missing = [cell for cell in cells if (index, cell) not in work.scores]
        if missing:
            with llm.engine.session():
                judge = _Judge(llm, question, index)
                for cell in missing:
                    work.add(judge.score(cell))
        progress(index)


class _Judge:
    """Scores cells on one question."""

    def __init__(self, llm: LLM, question: Question, index: int) -> None:
        self._llm = llm
        self._question = question
        self._index = index
        self._max_answer = question.max_answer
        self._stops = stop_ids(llm.model)
        llm.chunk_cache.clear()
        llm.chunk_cache.fill_all(question.prompt)
        full, self._full_ms = self._timed(lambda: llm.full_prefill(question.prompt, question.max_answer))
        self._answer, self._logits = self._generate(question.prompt, full, [], full.logits)

    def score(self, cell: Cell) -> Score:
        prompt = self._question.prompt
        if cell == FULL_PREFILL:
            return self._make(cell, self._answer, self._full_ms, charged_ratio=1.0)
        if cell == NO_CONTEXT:
            bare = self._question.no_context
            made, ms = self._timed(lambda: self._llm.full_prefill(bare, self._max_answer))
            return self._make(cell, self._generate(bare, made, [], made.logits)[0], ms, charged_ratio=0.0)
        policy = policy_named(cell.policy)
        made, ms = self._timed(lambda: self._llm.assemble(prompt, cell.ratio, self._max_answer, policy))
        logits = self._teacher_forced(made)
        agree = (logits.argmax(-1) == self._logits.argmax(-1)).tolist()
        answer = self._answer
        if not all(agree):
            # Up to the first disagreement, the greedy answer is that of the full prefill.
            kept = agree.index(False)
            answer, _ = self._generate(prompt, made, self._answer[:kept], logits[kept])
        kl = kl_per_token(self._logits, logits)
        return self._make(cell, answer, ms, made.charged_ratio, kl, agree)

    def _timed(self, prefill: Callable[[], Assembled]) -> tuple[Assembled, float]:
        """The prefilled prompt and the milliseconds until its first token is known."""
        start = time.perf_counter()
        made = prefill()
        int(made.logits.argmax())  # waits for the device
        return made, (time.perf_counter() - start) * 1e3

    def _generate(
        self, prompt: ChunkedPrompt, made: Assembled, kept: list[int], logits: torch.Tensor
    ) -> tuple[list[int], torch.Tensor]:
        """The greedy answer that begins with ``kept``, after which the logits are ``logits``; and the logits
        ``[tokens, vocab]`` by which each further token was chosen."""
        answer, seen = list(kept), []
        while True:
            seen.append(logits)
            answer.append(int(logits.argmax()))
            if answer[-1] in self._stops or len(answer) == self._max_answer:
                return answer, torch.stack(seen)
            logits = made.step([*prompt.token_ids, *answer])

    def _teacher_forced(self, made: Assembled) -> torch.Tensor:
        """Logits ``[tokens, vocab]`` by which each token of the full-prefill answer would have been chosen."""
        given = self._answer[:-1]
        if not given:
            return made.logits[None]
        start = len(self._question.prompt.token_ids)
        end = start + len(given)
        behind = self._llm.engine.forward(given, range(start, end), made.kv, end, last=len(given))
        return torch.cat([made.logits[None], behind])

    def _make(
        self,
        cell: Cell,
        answer: list[int],
        prefill_ms: float,
        charged_ratio: float,
        kl: list[float] | None = None,
        agree: list[bool] | None = None,
    ) -> Score:
        assert self._llm.tokenizer is not None  # prompts were made of text
        text = first_line(self._llm.tokenizer.decode(answer, skip_special_tokens=True))
        gold = self._question.answers
        em, f1 = exact_match(text, gold), word_f1(text, gold)
        # References have no KL: without chunks there is nothing to compare, and the full prefill would equal itself.
        return Score(self._index, *cell, charged_ratio, kl or [], agree or [], em, f1, prefill_ms, text)
