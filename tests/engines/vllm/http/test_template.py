"""The log line about a server's chat template."""

import logging
from types import SimpleNamespace

import pytest

from kvmosaic.engines.vllm.http.template import say_which_sources_work

TEMPLATE = "{% for document in documents or [] %}{{ document.text }}\n{% endfor %}{{ messages[-1].content }}"


@pytest.fixture
def model(smollm2_folder):
    return SimpleNamespace(
        tokenizer=str(smollm2_folder), tokenizer_revision=None, trust_remote_code=False, skip_tokenizer_init=False
    )


@pytest.fixture
def say(model, caplog):
    """The lines that are logged."""
    caplog.set_level(logging.INFO)
    logging.getLogger("vllm").addHandler(caplog.handler)  # vLLM's loggers pass nothing on
    logging.getLogger("vllm").setLevel(logging.INFO)

    def say(template):
        caplog.clear()
        say_which_sources_work(model, template)
        return list(dict.fromkeys(record.getMessage() for record in caplog.records if "template" in record.name))

    yield say
    logging.getLogger("vllm").removeHandler(caplog.handler)


def test_the_models_own_template(say):
    [line] = say(None)
    assert "content parts, tool results" in line
    assert 'the field "documents" never' in line


def test_a_template_that_the_server_was_started_with(say, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    for given in (TEMPLATE, str(file)):
        [line] = say(given)
        assert 'takes documents from the field "documents", content parts; documents in tool results' in line


def test_a_tokenizer_that_cannot_be_read_ends_nothing(say, model):
    model.tokenizer = "/nowhere/at/all"
    [line] = say(None)
    assert "cannot tell" in line


def test_an_engine_without_a_tokenizer_says_nothing(say, model):
    model.skip_tokenizer_init = True
    assert say(None) == []
