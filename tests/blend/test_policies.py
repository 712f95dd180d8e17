"""Every policy, through the embedded engine and a model as deep as a real one."""

import pytest
import torch

from kvmosaic.blend import POLICIES, Selection, policy_named
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.hf.chat import chat_prompt, messages_about
from kvmosaic.hf import LLM

SPECS = [
    *POLICIES,
    "sink-link(k=2)",
    "query-attention(span=1, layers=2)",
    "kv-deviation(part=v, layers=1+8+16)",
    "kv-deviation(unit=document)",
    "kv-deviation(threshold=2)",
    "composite(first=1, runs=4, asking=1)",
]
SPARING = ["sink-link(k=2)", "kv-deviation(threshold=2)"]
"""Those of ``SPECS`` that may leave more than half of the budget."""
DOCUMENTS = [
    "The ferry to Orsa leaves at 7:40 from the north pier. Its captain is Maud Lind, who also runs the kiosk.",
    "The bakery on Mill Street belongs to Agnes Bell. She bakes rye bread on Mondays and sells it until noon.",
    "The museum of clocks opens at ten. Its oldest clock was built by Per Holm in 1684 and still strikes the hours.",
]


@pytest.fixture(scope="module")
def llm(narrow, tokenizer):
    return LLM(narrow, tokenizer, enable_chunk_cache=True, miss_policy="fill-first")


@pytest.fixture(scope="module")
def prompt(llm):
    messages = messages_about("You are helpful.", DOCUMENTS, "Who built the oldest clock?")
    return llm.parser.parse_named(chat_prompt(llm.tokenizer, messages).token_ids, DOCUMENTS).prompt


@pytest.fixture(scope="module")
def full(llm, prompt):
    with llm.engine.session():
        return llm.full_prefill(prompt)


def assembled(llm, prompt, spec, ratio):
    with llm.engine.session():
        return llm.assemble(prompt, ratio, 0, policy_named(spec))


@pytest.mark.parametrize("spec", SPECS)
def test_ratio_one_is_a_full_prefill(llm, prompt, full, spec):
    result = assembled(llm, prompt, spec, 1.0)
    torch.testing.assert_close(result.logits, full.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(result.kv.k, full.kv.k, atol=1e-3, rtol=1e-4)
    assert result.charged_ratio == 1.0


@pytest.mark.parametrize("spec", SPECS)
def test_ratio_zero_recomputes_nothing(llm, prompt, spec):
    result = assembled(llm, prompt, spec, 0.0)
    assert (result.recomputed, result.charged_ratio) == ((), 0.0)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in ("none", "all")])
@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_what_is_charged_stays_within_the_ratio(llm, prompt, spec, ratio):
    result = assembled(llm, prompt, spec, ratio)
    assert result.charged_ratio <= ratio + 1e-6
    if spec not in SPARING:
        assert result.charged_ratio > 0.5 * ratio


def test_a_shrinking_set_leaves_reused_kv_behind_its_checks(llm, prompt):
    """From check to check fewer rows are new, and they are the same rows every time."""
    spec = "kv-deviation(part=v, layers=1+8+16)"
    once, twice = (assembled(llm, prompt, spec, 0.6) for _ in range(2))
    assert torch.equal(once.logits, twice.logits)
    with llm.engine.session():
        untouched = llm.assemble(prompt, 0.0)
    changed = (once.kv.k != untouched.kv.k).any(-1).any(1).sum(1)  # [layers]: rows that differ from the reused ones
    fresh = len(list(prompt.fresh_positions()))
    counts = [int(count) - fresh for count in changed]
    assert 0 < counts[20] < counts[10] < counts[4]


@pytest.mark.parametrize(
    "spec",
    ["", "nonsense", "sink-link(k=-1)", "sink-link(k=x)", "sink-link(q=1)", "sink-link(k)", "sink-link(k=1,k=2)",
     "kv-deviation(part=q)", "kv-deviation(layers=8+1)", "kv-deviation(layers=)", "composite(runs=0)", "none(k=1)",
     "composite(reach=0)", "composite(reach=nan)",
     "query-attention(span=0)", "random(seed=1.5)", "composite(", "composite)("],
)  # fmt: skip
def test_bad_policies_are_refused_in_one_line(spec):
    with pytest.raises(ConfigError) as error:
        policy_named(spec)
    assert "\n" not in str(error.value)


def test_a_layer_the_model_does_not_have(llm, prompt):
    with pytest.raises(ConfigError, match="layer 99"):
        assembled(llm, prompt, "kv-deviation(layers=99)", 0.5)


def test_layer_tokens_of_a_selection():
    assert Selection((1, 2, 3)).layer_tokens(10) == 30
    assert Selection().layer_tokens(10) == 0
