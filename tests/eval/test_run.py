"""The evaluation: its numbers, and that interruptions leave no trace."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from kvmosaic.core.errors import ConfigError, PromptError
from kvmosaic.eval.base import Cell, Example
from kvmosaic.eval.plan import (
    ALL,
    AUTO,
    FULL_PREFILL,
    LONG_ANSWER,
    NAMED,
    NO_CONTEXT,
    NONE,
    SHORT_ANSWER,
    make_cells,
    make_plan,
)
from kvmosaic.eval.report import render
from kvmosaic.eval.run import evaluate
from kvmosaic.eval.summary import Summary, summarise
from kvmosaic.eval.work_file import WorkFile
from kvmosaic.hf import LLM

EXAMPLES = [
    Example("Be brief.", ("Anna has a red cat.", "Bert has a blue dog.", "Carl sells tea."), question, (answer,))
    for question, answer in (("Who has a dog?", "Bert"), ("What does Carl sell?", "tea"))
]
ANSWER = 4


@pytest.fixture(scope="module")
def llm(narrow, tokenizer):
    settings = {"miss_policy": "fill-first", "disk_path": None, "tenant": "eval"}  # as in the command
    with LLM(narrow, tokenizer, enable_chunk_cache=True, **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def plan(llm):
    return make_plan(llm, EXAMPLES, make_cells(["composite", "sink-link(k=2)"], [0, 0.3, 1]), ANSWER)


@pytest.fixture(scope="module")
def finished(llm, plan, tmp_path_factory):
    with WorkFile(tmp_path_factory.mktemp("whole"), plan.digest) as work:
        evaluate(llm, plan, work)
    return work


def timeless(scores):
    """A result without its times."""
    return {key: score._replace(prefill_ms=0.0) for key, score in scores.items()}


def test_both_ends_and_random_are_always_measured():
    assert make_cells(["composite"], [0, 0.1, 0.3, 1]) == make_cells(["composite"], [0.3, 0.1])
    cells = make_cells(["composite"], [0.3, 0.1])
    assert cells[0] == NONE
    assert cells[-1] == ALL
    assert {Cell(policy, ratio) for policy in ("random", "composite") for ratio in (0.1, 0.3)} == set(cells[1:-1])


def test_scores_are_what_they_say(llm, plan, finished):
    for index, question in enumerate(plan.questions):
        full = finished.scores[index, FULL_PREFILL]
        [expected] = llm.generate(question.prompt, max_tokens=ANSWER, temperature=0, use_chunk_cache=False)
        assert full.answer == expected.text.strip().partition("\n")[0].strip()
        exact = finished.scores[index, ALL]
        assert exact.charged_ratio == 1
        assert max(exact.kl) < 1e-6
        assert all(exact.agree)
        assert exact.answer == full.answer
        reused = finished.scores[index, NONE]
        assert reused.charged_ratio == 0
        assert max(reused.kl) > 1e-3
        for cell in plan.cells:
            score = finished.scores[index, cell]
            assert len(score.kl) == len(score.agree) <= ANSWER
            assert score.prefill_ms > 0
            # The answer that teacher forcing finds is that of plain generation.
            [own] = llm.generate(
                question.prompt, max_tokens=ANSWER, temperature=0, recompute_ratio=cell.ratio, policy=cell.policy
            )
            assert score.answer == own.text.strip().partition("\n")[0].strip()


class _Interrupted(Exception):
    pass


@pytest.mark.parametrize("stop_after", [4, 9])
def test_an_interrupted_run_goes_on_where_it_stopped(llm, plan, finished, tmp_path, monkeypatch, stop_after):
    with WorkFile(tmp_path, plan.digest) as work, monkeypatch.context() as patch:
        add = work.add

        def stop(score):
            if len(work.scores) == stop_after:
                raise _Interrupted
            add(score)

        patch.setattr(work, "add", stop)
        with pytest.raises(_Interrupted):
            evaluate(llm, plan, work)
    with open(work.path, "ab") as file:
        file.write(b'{"example": 0, "policy": "rand')  # the line that it was writing
    with WorkFile(tmp_path, plan.digest) as work:
        assert len(work.scores) == stop_after
        kept = dict(work.scores)
        evaluate(llm, plan, work)
        assert {key: work.scores[key] for key in kept} == kept  # times included: they were not measured again
    with WorkFile(tmp_path, plan.digest) as again:
        assert timeless(again.scores) == timeless(finished.scores)


def test_results_of_other_settings_are_refused(llm, plan, tmp_path):
    other = make_plan(llm, EXAMPLES, plan.cells, ANSWER + 1)
    assert other.digest != plan.digest
    WorkFile(tmp_path, plan.digest).__exit__(None, None, None)
    with pytest.raises(ConfigError, match="other settings"):
        WorkFile(tmp_path, other.digest)


def test_a_damaged_line_is_reported(plan, tmp_path):
    WorkFile(tmp_path, plan.digest).__exit__(None, None, None)
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes() + b"{}\n{}\n")
    with pytest.raises(ConfigError, match="line 2: damaged"):
        WorkFile(tmp_path, plan.digest)


def test_the_summary_is_that_of_the_scores(plan, finished):
    summary = summarise(finished.scores, plan.cells, 2, "bos")
    full, none = ([finished.scores[i, cell].f1 for i in range(2)] for cell in (FULL_PREFILL, NO_CONTEXT))
    for cell, line in zip(plan.cells, summary.lines, strict=True):
        scores = [finished.scores[i, cell] for i in range(2)]
        row = line.row
        assert (row.policy, row.ratio, row.n) == (*cell, 2)
        assert row.kl_mean == pytest.approx(np.mean([np.mean(score.kl) for score in scores]))
        assert row.f1 == pytest.approx(np.mean([score.f1 for score in scores]))
        if np.mean(full) - np.mean(none) >= 0.01:
            assert row.gap_closed == pytest.approx((row.f1 - np.mean(none)) / (np.mean(full) - np.mean(none)))
        else:
            assert row.gap_closed is None
        if cell in (NONE, ALL) or cell.policy == "random":
            assert line.kl_to_random == pytest.approx((0, 0, 0), abs=1e-9)
    json.dumps(summary.as_dict())
    assert summary == summarise(finished.scores, plan.cells, 2, "bos")


def test_the_report_stands_alone(plan, finished):
    html = render("a <model> & data", summarise(finished.scores, plan.cells, 2, "bos"))
    assert "a &lt;model&gt; &amp; data" in html
    # Four plots, and the shapes of three policies in the legend.
    assert html.count('role="img"') == 4
    assert html.count("<svg") == 4 + 3
    for policy in ("random", "composite", "sink-link(k=2)"):
        assert f"</svg>{policy}</span>" in html
    assert "http" not in html
    assert "<script" not in html
    for cell in plan.cells:
        assert f"<td>{cell.policy}</td><td>bos</td><td>auto</td><td>{cell.ratio:g}</td>" in html


def test_several_sink_prefixes_are_lines_of_one_summary(plan, finished):
    apart = [summarise(finished.scores, plan.cells, 2, sink) for sink in ("bos", "learned:/some/where/my.sink")]
    both = Summary.joined(apart)
    assert [row["sink_prefix"] for row in both.as_dict()["rows"]] == ["bos"] * len(plan.cells) + [
        "learned:/some/where/my.sink"
    ] * len(plan.cells)
    html = render("both", both)
    for policy in ("random", "composite", "sink-link(k=2)"):
        for sink in ("bos", "my.sink"):
            assert f"</svg>{policy} after {sink}</span>" in html


def test_entries_in_8_bits_are_lines_of_their_own(plan, finished):
    both = Summary.joined([summarise(finished.scores, plan.cells, 2, "bos", 0, dtype) for dtype in ("auto", "int8")])
    dtypes = ["auto"] * len(plan.cells) + ["int8"] * len(plan.cells)
    assert [row["entry_dtype"] for row in both.as_dict()["rows"]] == dtypes
    html = render("both", both)
    for policy in ("random", "composite", "sink-link(k=2)"):
        for dtype in ("auto", "int8"):
            assert f"</svg>{policy} in {dtype}</span>" in html


def test_prompts_the_model_cannot_take_are_refused_before_any_work(llm):
    cells = make_cells([], [])
    with pytest.raises(PromptError, match=r"example 1 \('Who has a dog\?'\): .* exceed"):
        make_plan(llm, EXAMPLES, cells, llm.max_positions)
    with pytest.raises(PromptError, match=r"example 1 \('q'\): all of its chunks are empty"):
        make_plan(llm, [Example("s", ("", " "), "q", ("a",))], cells, 4)
    with pytest.raises(ConfigError, match="layer 99"):
        make_plan(llm, EXAMPLES, make_cells(["kv-deviation(layers=99)"], [0.3]), 4)


def test_chunks_can_be_what_a_server_finds_by_itself(llm):
    words = ["red", "blue", "cat", "dog", "tea", "cup", "sun", "sea"]
    documents = [" ".join(random.choices(words, k=150)) for _ in range(6)]
    examples = [
        Example("Be brief.", tuple(texts), question, ("Bert",))
        for texts, question in ((documents[:3], "Who has tea?"), (documents[3:], "Who has a cat?"))
    ]
    cells = make_cells([], [])
    named, found = (make_plan(llm, examples, cells, 4, sources).questions for sources in (NAMED, AUTO))
    for one, other in zip(named, found, strict=True):
        assert one.prompt.token_ids == other.prompt.token_ids
        places = [{position for span in each.prompt.chunks for position in span.positions} for each in (one, other)]
        assert len(places[0] & places[1]) > 0.7 * len(places[0])
        assert len(places[1] - places[0]) < 40  # edges of documents, and text between them
    with pytest.raises(PromptError, match=r"too short \(chunk_sources=auto needs at least 64 tokens"):
        make_plan(llm, EXAMPLES, cells, 4, AUTO)


def test_a_chunk_that_cannot_be_reused_is_no_perfect_reuse(narrow, tokenizer):
    """With a sink prefix as long as the context, every chunk would be ordinary text, and every policy would seem
    perfect."""
    long = "word " * narrow.config.max_position_embeddings
    with (
        LLM(narrow, tokenizer, enable_chunk_cache=True, sink_prefix=long) as llm,
        pytest.raises(PromptError, match="shorter sink prefix"),
    ):
        make_plan(llm, EXAMPLES, make_cells([], []), 4)


def test_an_answer_is_as_long_as_the_right_one_needs(llm):
    def room(*answers, limit=None):
        example = Example("s", EXAMPLES[0].chunks, "q", answers)
        [question] = make_plan(llm, [example], make_cells([], []), limit).questions
        return question.max_answer

    assert room("tea") == SHORT_ANSWER
    assert SHORT_ANSWER < room("tea", "7f0c-" * 5) < LONG_ANSWER
    assert room("tea " * 100) == LONG_ANSWER
    assert room("tea " * 100, limit=3) == 3


@pytest.mark.parametrize("chat", [True, False])
def test_the_model_goes_on_behind_the_lead(llm, monkeypatch, chat):
    if not chat:
        monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with_lead = Example("Be brief.", ("Anna has a cat.",), "Who has a cat?", ("Anna",), "The cat belongs to")
    [question] = make_plan(llm, [with_lead], make_cells([], []), 4).questions
    for prompt in question.prompt, question.no_context:
        text = llm.tokenizer.decode(prompt.token_ids)
        assert text.endswith("assistant\nThe cat belongs to" if chat else "Who has a cat?\nThe cat belongs to")
    [plain] = make_plan(llm, [replace(with_lead, lead="")], make_cells([], []), 4).questions
    assert llm.tokenizer.decode(plain.prompt.token_ids).endswith("assistant\n" if chat else "Who has a cat?")
