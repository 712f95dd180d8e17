"""Unchanged applications: their clients send documents as usual, and the server reuses them."""

import json
import random

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.engines.vllm.archive import (
    DOCUMENTS,
    LISTS_DOCUMENTS,
    NUMBER,
    QUESTION,
    TOOL,
    TRIMS,
    parts,
    results,
    shuffled,
    system_prompt,
    user,
)
from tests.engines.vllm.server import serving
from tests.required import missing

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m"
OPTIONS = "--max-model-len 2048 --trust-request-chat-template --enable-auto-tool-choice --tool-call-parser hermes"
ASKS = {"x-kvmosaic": "report"}
SHARE = 0.9
"""Minimum share of the documents' tokens that is reused."""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server that has stored the documents, after a request with each of them in a separate message."""
    log = tmp_path_factory.mktemp("serve") / "log"
    settings = {"KVMOSAIC_MISS_POLICY": "fill-first", "KVMOSAIC_CHUNK_SEPARATOR": ""}
    with serving(MODEL, log, *OPTIONS.split(), "--client-parameters", "all", **settings) as url:
        for document in DOCUMENTS:
            openai(url).chat.completions.create(model=MODEL, messages=[user([document, QUESTION])], max_tokens=2)
        yield url


def openai(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)


@pytest.fixture
def client(url):
    return openai(url)


@pytest.fixture
def share(tokenizer):
    """Share of the documents' tokens that were reused, according to a report."""
    tokens = sum(len(tokenizer(document).input_ids) for document in DOCUMENTS)

    def share_of(report):
        report = json.loads(report) if isinstance(report, str) else report
        return report.get("reused_tokens", 0) / tokens

    return share_of


def ask(client, messages, **more):
    """The answer's header, and the answer."""
    more = {"max_tokens": 4, "temperature": 0} | more
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, extra_headers=ASKS, **more)
    return raw.headers.get("x-kvmosaic"), raw.parse()


# --- the OpenAI client


@pytest.mark.parametrize(
    ("template", "label", "after"),
    [
        (None, "", ""),
        (TRIMS, "Source {}: ", ""),
        pytest.param(None, "Source {}: ", "", marks=pytest.mark.long),
        pytest.param(TRIMS, "  [{}]\n", "\n\n", marks=pytest.mark.long),
    ],
    ids=["as-they-are", "labels-trimmed", "labels", "lines-trimmed"],
)
def test_content_parts(client, share, template, label, after):
    more = {"extra_body": {"chat_template": template}} if template else {}
    header, answer = ask(client, parts(label, after), **more)
    assert share(header) >= SHARE
    assert share(answer.kv_transfer_params) == share(header)


def test_tool_results(client, share):
    header, _ = ask(client, results(), tools=[TOOL])
    assert share(header) >= SHARE


def test_the_field_for_documents(client, share):
    documents = [{"title": f"about box {number}", "text": f" {text}\n"} for number, text in enumerate(shuffled())]
    messages = [{"role": "system", "content": system_prompt()}, {"role": "user", "content": QUESTION}]
    extra = {"documents": documents, "chat_template": LISTS_DOCUMENTS}
    header, _ = ask(client, messages, extra_body=extra)
    assert share(header) >= SHARE


def test_a_stream_has_the_report_at_its_end(client, share):
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=parts(),
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=ASKS,
        )
    )
    assert share(chunks[-1].kv_transfer_params) >= SHARE
    assert chunks[-1].choices == []
    assert (chunks[-1].id, chunks[-1].model, chunks[-1].object) == (chunks[0].id, MODEL, "chat.completion.chunk")
    assert chunks[-2].usage.completion_tokens == 4
    assert not any("kv_transfer_params" in (chunk.model_extra or {}) for chunk in chunks[:-1])


def test_without_asking_there_is_no_report(client):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=parts(), max_tokens=2)
    assert "x-kvmosaic" not in raw.headers
    assert raw.parse().model_extra.get("kv_transfer_params") is None
    stream = client.chat.completions.create(model=MODEL, messages=parts(), max_tokens=2, stream=True)
    assert all(chunk.choices for chunk in stream)


@pytest.mark.long
def test_structured_output_and_tools(client, share):
    schema = {"type": "json_schema", "json_schema": {"name": "box", "schema": NUMBER, "strict": True}}
    header, answer = ask(client, parts(), response_format=schema, max_tokens=40)
    assert share(header) >= SHARE
    assert json.loads(answer.choices[0].message.content)["box"] in (1, 2, 35)
    header, answer = ask(client, results(), tools=[TOOL], tool_choice="required", max_tokens=60)
    assert share(header) >= SHARE


@pytest.mark.parametrize("is_streamed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_items_of_the_responses_api(client, share, is_streamed):
    texts = [{"type": "input_text", "text": text} for text in (*shuffled(), QUESTION)]
    request = {
        "model": MODEL,
        "instructions": system_prompt(),
        "input": [{"role": "user", "content": texts}],
        "max_output_tokens": 4,
        "extra_headers": ASKS,
    }
    if not is_streamed:
        raw = client.responses.with_raw_response.create(**request)
        assert share(raw.headers["x-kvmosaic"]) >= SHARE
        assert raw.parse().status == "incomplete"
        return
    assert [event.type for event in client.responses.create(**request, stream=True)][-1].startswith("response.")
    request["input"] = [{"role": "user", "content": texts[::-1]}]
    with client.responses.with_streaming_response.create(**request, stream=True) as raw:
        comments = [line for line in raw.iter_lines() if line.startswith(": kvmosaic ")]
    assert share(comments[0].removeprefix(": kvmosaic ")) >= SHARE * 3 / 4  # the last one became the question


def test_explicit_names_in_a_completion(client, share):
    prompt = "\n".join([system_prompt(), *shuffled(), QUESTION])
    extra = {"kv_transfer_params": {"documents": DOCUMENTS}}
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=prompt, max_tokens=4, extra_headers=ASKS, extra_body=extra
    )
    assert share(raw.headers["x-kvmosaic"]) >= SHARE


# --- nothing is changed


@pytest.mark.parametrize(
    ("messages", "params"),
    [
        (lambda: parts(), {"recompute_ratio": 1.0}),
        pytest.param(lambda: results(), {"recompute_ratio": 1.0}, marks=pytest.mark.long),
        (lambda: [{"role": "user", "content": QUESTION}], {"documents": [f"{text} And more." for text in DOCUMENTS]}),
    ],
    ids=["parts-ratio-1", "results-ratio-1", "absent"],
)
def test_answers_are_those_of_plain_vllm(client, messages, params):
    """Each request has its own salt, so that vLLM's prefix cache has nothing for it."""
    asked = messages()
    answers = []
    for number, sent in enumerate((params, {"chunk_cache": False})):
        extra = {"kv_transfer_params": sent, "ignore_eos": True, "cache_salt": f"{number} {random.random()}"}
        _, answer = ask(client, asked, logprobs=True, max_tokens=8, extra_body=extra)
        answers.append(answer.choices[0])
    assert answers[0].message.content == answers[1].message.content
    ours, theirs = ([token.logprob for token in answer.logprobs.content] for answer in answers)
    if "documents" in params:
        assert ours == theirs
    else:
        assert ours == pytest.approx(theirs, abs=1e-3)


# --- other clients


def test_the_messages_api(url, share):
    client = Anthropic(base_url=url, api_key="none", timeout=300)
    request = {"model": MODEL, "max_tokens": 4, "extra_headers": ASKS}
    raw = client.messages.with_raw_response.create(
        **request, system=system_prompt(), messages=[user([*shuffled(), QUESTION])]
    )
    assert share(raw.headers["x-kvmosaic"]) >= SHARE
    used = [{"type": "tool_use", "id": f"t{number}", "name": "search", "input": {}} for number in range(4)]
    found = [
        {"type": "tool_result", "tool_use_id": f"t{number}", "content": [{"type": "text", "text": text}]}
        for number, text in enumerate(shuffled())
    ]
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": used},
        {"role": "user", "content": found},
    ]
    raw = client.messages.with_raw_response.create(**request, system=system_prompt(), messages=messages)
    assert share(raw.headers["x-kvmosaic"]) >= SHARE
    with client.messages.stream(**request, system=system_prompt(), messages=messages) as stream:
        assert stream.get_final_message().usage.output_tokens == 4
    with client.messages.with_streaming_response.create(
        **request, system=system_prompt(), messages=messages, stream=True
    ) as raw:
        comments = [line for line in raw.iter_lines() if line.startswith(": kvmosaic ")]
    assert share(comments[0].removeprefix(": kvmosaic ")) >= SHARE


@pytest.fixture
def langchain(url):
    try:
        from langchain_openai import ChatOpenAI
    except ImportError:
        missing("there is no package langchain-openai", "`make test-vllm` installs it")
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        max_tokens=40,
        temperature=0,
        default_headers=ASKS,
        include_response_headers=True,
    )


def test_langchain(langchain, share):
    from langchain_core.prompts import ChatPromptTemplate

    blocks = [{"type": "text", "text": f"{{document{number}}}"} for number in range(len(DOCUMENTS))]
    template = ChatPromptTemplate.from_messages(
        [("system", "{system}"), ("human", [*blocks, {"type": "text", "text": "{question}"}])]
    )
    chain = template | langchain
    values = {"system": system_prompt(), "question": QUESTION}
    values |= {f"document{number}": text for number, text in enumerate(shuffled())}
    answer = chain.invoke(values)
    assert share(answer.response_metadata["headers"]["x-kvmosaic"]) >= SHARE
    assert "".join(chunk.text for chunk in chain.stream(values)).strip()


@pytest.mark.long
def test_langchain_tool_results_and_structured_output(langchain, share):
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

    calls = [{"name": "search", "args": {}, "id": f"call{number}"} for number in range(len(DOCUMENTS))]
    messages = [SystemMessage(system_prompt()), HumanMessage(QUESTION), AIMessage("", tool_calls=calls)]
    messages += [ToolMessage(text, tool_call_id=f"call{number}") for number, text in enumerate(shuffled())]
    answer = langchain.bind_tools([TOOL]).invoke(messages)
    assert share(answer.response_metadata["headers"]["x-kvmosaic"]) >= SHARE
    messages[0] = SystemMessage(system_prompt())
    schema = {"title": "box", **NUMBER}
    structured = langchain.with_structured_output(schema, method="json_schema", include_raw=True)
    answer = structured.invoke(messages)
    assert answer["parsed"]["box"] in (1, 2, 35)


@pytest.mark.long
def test_llama_index(url, share):
    """It joins text parts into one text, so its documents are tool results or named."""
    try:
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike
    except ImportError:
        missing("there is no package llama-index-llms-openai-like", "`make test-vllm` installs it")

    def model(**more):
        return OpenAILike(
            model=MODEL,
            api_base=f"{url}/v1",
            api_key="none",
            is_chat_model=True,
            max_tokens=4,
            default_headers=ASKS,
            **more,
        )

    messages = [ChatMessage(role="system", content=system_prompt()), ChatMessage(role="user", content=QUESTION)]
    messages += [
        ChatMessage(role="tool", content=text, additional_kwargs={"tool_call_id": f"call{number}"})
        for number, text in enumerate(shuffled())
    ]
    answer = model().chat(messages)
    assert share(answer.raw.kv_transfer_params) >= SHARE
    messages[0] = ChatMessage(role="system", content=system_prompt())
    assert share(list(model().stream_chat(messages))[-1].raw.kv_transfer_params) >= SHARE
    named = model(additional_kwargs={"extra_body": {"kv_transfer_params": {"documents": DOCUMENTS}}})
    messages = [
        ChatMessage(role="system", content=system_prompt()),
        ChatMessage(role="user", content="\n\n".join([*shuffled(), QUESTION])),
    ]
    assert share(named.chat(messages).raw.kv_transfer_params) >= SHARE


@pytest.mark.long
def test_a_chain_that_nobody_changed(tmp_path, share):
    """Its prompt is one text in which nothing is named. From the third request on, documents are reused, even if the
    same documents are side by side again."""
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    template = ChatPromptTemplate.from_template("{system}\n\n{context}\n\nQuestion: {question}")
    options = ["--max-model-len", "2048", "--client-parameters", "all", "--chunk-sources", "auto"]
    with serving(MODEL, tmp_path / "log", *options, KVMOSAIC_MISS_POLICY="fill-first") as url:
        more = {"default_headers": ASKS, "include_response_headers": True}
        chain = template | ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=4, **more)
        for number, order in enumerate([(0, 1, 2, 3), (3, 2, 1, 0), (3, 0, 2, 1), (2, 1, 0, 3), (2, 1, 3, 0)]):
            context = "\n\n".join(DOCUMENTS[index] for index in order)
            answer = chain.invoke({"system": system_prompt(), "context": context, "question": QUESTION})
            if number >= 2:
                assert share(answer.response_metadata["headers"]["x-kvmosaic"]) >= 0.7
