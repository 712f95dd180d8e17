"""``kvmosaic.vllm.LLM``: documents that are named in Python, and documents in messages."""

from copy import deepcopy

import pytest
from vllm import SamplingParams

from kvmosaic.core.errors import PromptError
from tests.engines.vllm.helpers import DOCUMENTS, OURS, greedy, start, statuses

pytestmark = pytest.mark.engine

QUESTION = "Who owns the bakery?"
REPORT = greedy(4, params={"report": True})


@pytest.fixture(scope="module")
def llm(tiny_text):
    return start(tiny_text, miss_policy="fill-first", chunk_separator=None)


def chunks(outputs):
    """Number of reused chunks of each answer."""
    return [statuses(output).count("cached") if "chunks" in output.kv_transfer_params else 0 for output in outputs]


def parts(*texts):
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


@pytest.fixture(scope="module", autouse=True)
def stored(llm):
    """Have all documents stored."""
    llm.generate("\n\n".join(DOCUMENTS) + QUESTION, REPORT, documents=DOCUMENTS, use_tqdm=False)


def test_documents_of_prompts(llm):
    prompts = [f"Read {DOCUMENTS[0]} and {DOCUMENTS[1]} {QUESTION}", f"Or read: {DOCUMENTS[2]} {QUESTION}"]
    before = deepcopy(REPORT)
    assert chunks(llm.generate(prompts, REPORT, documents=DOCUMENTS, use_tqdm=False)) == [2, 1]
    assert before == REPORT  # the caller's own
    llm.reset_prefix_cache()
    own = [DOCUMENTS[1:2], DOCUMENTS[:1]]
    assert chunks(llm.generate(prompts, [REPORT, REPORT], documents=own, use_tqdm=False)) == [1, 0]
    llm.reset_prefix_cache()
    tokens = {"prompt_token_ids": llm.get_tokenizer().encode(prompts[0])}
    assert chunks(llm.generate(tokens, REPORT, documents=DOCUMENTS, use_tqdm=False)) == [2]
    llm.reset_prefix_cache()
    assert chunks(llm.generate(prompts, REPORT, use_tqdm=False)) == [0, 0]
    with pytest.raises(PromptError, match="documents must be"):
        llm.generate(prompts, REPORT, documents=own[:1], use_tqdm=False)


def test_documents_of_conversations(llm):
    talks = [parts(DOCUMENTS[1], DOCUMENTS[0], QUESTION), parts(DOCUMENTS[2]), parts(f"{DOCUMENTS[3]} {QUESTION}")]
    assert chunks(llm.chat(talks, REPORT, use_tqdm=False)) == [2, 0, 0]
    llm.reset_prefix_cache()
    assert chunks(llm.chat(talks[2], REPORT, documents=DOCUMENTS, use_tqdm=False)) == [1]
    tool = [{"role": "user", "content": QUESTION}, {"role": "tool", "tool_call_id": "1", "content": DOCUMENTS[1]}]
    assert chunks(llm.chat(tool, REPORT, use_tqdm=False)) == [1]


def test_what_the_caller_set_counts(llm):
    talk = parts(DOCUMENTS[1], DOCUMENTS[0], QUESTION)
    mine = greedy(4, params={"report": True, "documents": DOCUMENTS[:1]})
    assert chunks(llm.chat(talk, mine, use_tqdm=False)) == [1]
    assert len(llm.generate(["Who?", "Why?"], documents=DOCUMENTS, use_tqdm=False)) == 2  # vLLM's own parameters
    with pytest.raises(Exception, match="the same"):  # vLLM's own
        llm.generate(["Who?", "Why?"], [SamplingParams()], documents=DOCUMENTS, use_tqdm=False)


def test_separators_count_before_the_question_and_not_in_it(tiny_text):
    llm = start(tiny_text, miss_policy="fill-first", chunk_sources="none")
    separator = OURS["chunk_separator"]
    asked = [{"type": "text", "text": separator.join(["Is", "this", "one?"])}]
    talk = [
        {"role": "user", "content": separator.join(["Read.", *DOCUMENTS[:2], ""])},
        {"role": "user", "content": asked},
    ]
    llm.chat(talk, REPORT, use_tqdm=False)
    llm.reset_prefix_cache()
    assert chunks(llm.chat(talk, REPORT, use_tqdm=False)) == [2]
