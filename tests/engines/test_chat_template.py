"""Which documents of chat requests reach the prompt, with templates like those of well-known models."""

import copy

import pytest

from kvmosaic.engines.chat_template import QUESTION, SAMPLES, working_sources

STRINGS = "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}\n{% endfor %}"
"""Accepts only texts, of every role."""
LISTS = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text | trim }}{% endfor %}{% endif %}{% endfor %}"
)
WITH_DOCUMENTS = (
    "{% for document in documents or [] %}[{{ document.title }}] {{ document.text | tojson }}\n{% endfor %}" + STRINGS
)
STRICT = (
    "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{{ '[INST] ' + message.content + ' [/INST]' }}{% endfor %}"
)
"""Concatenates texts, so it fails with a list. It also refuses tools."""
LAST_ONLY = "{{ messages[-1].content[:20] }}"
TOOLS_IN_A_LIST = "{{ messages | selectattr('role', 'equalto', 'tool') | map(attribute='content') | list | tojson }}"


@pytest.mark.parametrize(
    ("template", "working"),
    [
        (STRINGS, ("parts", "tools")),
        (LISTS, ("parts", "tools")),
        (WITH_DOCUMENTS, ("documents", "parts", "tools")),
        (STRICT, ("parts",)),
        (LAST_ONLY, ()),
        (TOOLS_IN_A_LIST, ("tools",)),
    ],
    ids=["strings", "lists", "documents", "strict", "last-only", "tools-only"],
)
def test_what_reaches_the_prompt(tokenizer, template, working):
    assert working_sources(tokenizer, template).working == working
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    assert working_sources(other).working == working


def test_both_samples_have_to_be_there(tokenizer):
    assert working_sources(tokenizer, STRINGS + "{{ documents[0].text if documents else '' }}").working == (
        "parts",
        "tools",
    )


def test_what_is_said_of_it(tokenizer):
    said = str(working_sources(tokenizer, STRINGS))
    assert said == (
        "the chat template takes documents from content parts, tool results; "
        'documents in the field "documents" never reach the prompt'
    )
    assert "never" not in str(working_sources(tokenizer, WITH_DOCUMENTS))


def test_a_model_without_a_template(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    sources = working_sources(bare)
    assert (sources.working, sources.has_template) == ((), False)
    assert "no chat template" in str(sources)


def test_the_real_models_template(tokenizer):
    assert working_sources(tokenizer).working == ("parts", "tools")


def test_samples_are_no_parts_of_each_other():
    texts = (*SAMPLES, QUESTION)
    assert not any(a in b for a in texts for b in texts if a is not b)
