"""Documents that are named, in prompts and in conversations."""

import pytest

from kvmosaic.core.errors import PromptError
from kvmosaic.engines.hf.chat import chat_prompt, messages_about
from kvmosaic.hf import LLM
from tests.engines.hf.tiny import make

FERRY = "The ferry to Orsa leaves at 7:40 from the north pier. Its captain is Maud Lind, who also runs the kiosk."
BAKERY = "The bakery on Mill Street belongs to Agnes Bell. She bakes rye bread on Mondays and sells it until noon."
CLOCKS = "The museum of clocks opens at ten. Its oldest clock was built by Per Holm in 1684 and still strikes."
SETTINGS = {"enable_chunk_cache": True, "miss_policy": "fill-first"}
GREEDY = {"max_tokens": 2, "temperature": 0}


@pytest.fixture
def llm(narrow, tokenizer):
    with LLM(narrow, tokenizer, **SETTINGS) as engine:
        yield engine


def texts(*parts):
    return [{"type": "text", "text": part} for part in parts]


def chunks_of(llm, text, output):
    """The texts of an answer's chunks; ``text`` is its prompt."""
    tokens = llm.tokenizer.encode(text)
    return [llm.tokenizer.decode(tokens[chunk.span.start : chunk.span.end]) for chunk in output.chunks]


def core(document):
    return document.removeprefix("The").removesuffix(".")


def test_named_documents_are_chunks_wherever_they_stand(llm):
    text = f"Be brief.\n{FERRY}\n\nSource 2: {BAKERY} Who bakes?"
    [first] = llm.generate(text, documents=[BAKERY, CLOCKS, FERRY], **GREEDY)
    assert chunks_of(llm, text, first) == [core(FERRY), core(BAKERY)]
    assert first.absent_documents == (1,)
    [second] = llm.generate(f"Another beginning: <{BAKERY}> {FERRY}\nWhy?", documents=[FERRY, BAKERY], **GREEDY)
    assert [chunk.status for chunk in second.chunks] == ["cached"] * 2
    assert second.absent_documents == ()
    [plain] = llm.generate(text, **GREEDY)
    assert plain.chunks == ()


def test_each_prompt_may_have_documents_of_its_own(llm):
    prompts = [f"Read: {FERRY} Who?", f"Read: {BAKERY} Who?"]
    both = llm.generate(prompts, documents=[FERRY, BAKERY], **GREEDY)
    assert [len(output.chunks) for output in both] == [1, 1]
    assert [output.absent_documents for output in both] == [(1,), (0,)]
    own = llm.generate(prompts, documents=[[FERRY], [FERRY]], **GREEDY)
    assert [len(output.chunks) for output in own] == [1, 0]
    with pytest.raises(PromptError, match="documents must be"):
        llm.generate(prompts, documents=[[FERRY]], **GREEDY)


def test_parts_and_results_of_tools_are_documents(llm):
    [first] = llm.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": texts(FERRY, BAKERY, CLOCKS)}],
        **GREEDY,
    )
    assert [chunk.status for chunk in first.chunks] == ["filled"] * 2  # the last part is the question
    talk = [
        {"role": "user", "content": "When does the ferry leave?"},
        {"role": "assistant", "content": "I look it up."},
        {"role": "tool", "content": FERRY},
    ]
    [second] = llm.chat(talk, **GREEDY)
    assert [chunk.status for chunk in second.chunks] == ["cached"]
    outputs = llm.chat([talk, talk[:1]], documents=[[BAKERY], []], **GREEDY)
    assert [output.absent_documents for output in outputs] == [(0,), ()]
    assert [len(output.chunks) for output in outputs] == [1, 0]


def test_sources_can_be_switched_off(narrow, tokenizer):
    with LLM(narrow, tokenizer, chunk_sources="none", **SETTINGS) as llm:
        talk = [{"role": "user", "content": texts(FERRY, BAKERY, "Why?")}]
        assert llm.chat(talk, **GREEDY)[0].chunks == ()
        assert len(llm.chat(talk, documents=[BAKERY], **GREEDY)[0].chunks) == 1


def test_a_question_cannot_cut_its_prompt(narrow, tokenizer):
    with LLM(narrow, tokenizer, chunk_separator=" # # ", min_chunk_tokens=1, **SETTINGS) as llm:
        marked, asked = f"Read. # # {FERRY} # # {BAKERY} # # ", "Is # # this # # a chunk?"
        talk = [{"role": "user", "content": marked}, {"role": "user", "content": texts(asked)}]
        assert len(llm.chat(talk, **GREEDY)[0].chunks) == 2
        # In a message of one text it is unknown where the question begins.
        assert len(llm.chat([{"role": "user", "content": marked + asked}], **GREEDY)[0].chunks) == 4


def test_prompts_are_those_of_the_chat_template(llm):
    messages = messages_about("Be brief.", [FERRY, BAKERY], "Why?")
    assert messages[1]["content"] == f"{FERRY}\n\n{BAKERY}\n\nWhy?"
    wanted = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat_prompt(llm.tokenizer, messages).token_ids == wanted
    as_parts = [messages[0], {"role": "user", "content": texts(FERRY, BAKERY, "Why?")}]
    text = llm.tokenizer.decode(chat_prompt(llm.tokenizer, as_parts).token_ids)
    assert f"user\n{FERRY}\n{BAKERY}\nWhy?<|im_end|>" in text


def test_a_base_model_reads_paragraphs(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    prompt = chat_prompt(llm.tokenizer, messages_about("Be brief.", [FERRY], "Why?"), lead="Because")
    assert llm.tokenizer.decode(prompt.token_ids) == f"Be brief.\n\n{FERRY}\n\nWhy?\nBecause"


@pytest.mark.parametrize("template", ["{{ raise_exception('no\nroles') }}", "{{ messages[0]['content'] + 7 }}"])
def test_messages_that_the_template_refuses_are_one_line(llm, monkeypatch, template):
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(PromptError, match="chat template refuses") as error:
        llm.chat([{"role": "user", "content": "Why?"}])
    assert "\n" not in str(error.value)


def test_odd_messages_are_one_line(llm):
    with pytest.raises(PromptError, match="objects with a role"):
        llm.chat(["Why?"])
    with LLM(make("llama"), **SETTINGS) as without, pytest.raises(PromptError, match="no tokenizer"):
        without.chat([{"role": "user", "content": "Why?"}])
