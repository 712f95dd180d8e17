"""Multi-head latent attention (MLA) inside vLLM: an entry holds the latent and the rotated columns of all heads."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvmosaic.blend import policy_named
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.hf import LLM as HFEngine
from tests.engines.vllm.helpers import (
    HAS_AMX,
    LATENT,
    OURS,
    PART,
    ask,
    chosen_last,
    core_scheduler,
    draw,
    forget,
    greedy,
    join,
    plain_answer,
    report,
    same,
    start,
    statuses,
    store,
    stored_entry,
    worker_side,
)
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.test_tensor_parallel import answers

GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (GPU or hasattr(AttentionBackendEnum, "CPU_MLA")), reason="this release of vLLM has no MLA on CPUs"
    ),
]

SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "max_model_len": 1024, **LATENT}
LENGTHS = (21, 33, 48, 64, 70)
KERNELS = [
    {"attention_backend": "FLASH_ATTN_MLA", "dtype": "bfloat16"},
    {"attention_backend": "FLASHMLA", "dtype": "bfloat16", "block_size": 64},
    {"attention_backend": "TRITON_MLA", "dtype": "bfloat16"},
]
CPU_KERNELS = [{}, *([{"attention_backend": "AMX_MLA", "dtype": "bfloat16", "block_size": 32}] if HAS_AMX else [])]
needs_float32 = pytest.mark.skipif(GPU, reason="vLLM's kernels for GPUs do not support float32")


@pytest.fixture(
    scope="module",
    params=KERNELS if GPU else CPU_KERNELS,
    ids=lambda kernel: kernel.get("attention_backend", "float32"),
)
def llm(tiny_deepseek, request):
    with pytest.MonkeyPatch.context() as patch:
        if GPU:  # the other runner is refused with vLLM 0.26
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        yield start(tiny_deepseek, num_gpu_blocks_override=200, prefix_blocks=True, **SETTINGS | request.param)


@pytest.fixture
def rounding(llm):
    """Maximum error of a number: vLLM's fast kernels do not support float32."""
    return 2e-2 if is_rough(llm) else 1e-4


def is_rough(llm):
    return llm.llm_engine.vllm_config.model_config.dtype != torch.float32


@pytest.fixture(scope="module")
def reference(tiny_deepseek):
    """The embedded engine, which defines the results of reuse."""
    model = AutoModelForCausalLM.from_pretrained(tiny_deepseek, dtype=torch.float32).eval()
    return HFEngine(
        model, None, enable_chunk_cache=True, miss_policy="fill-first", **OURS | {"chunk_separator": None}
    )


def random_prompt():
    """A system prompt, documents and a question, as tokens; and its boundaries."""
    return join([draw(9), *map(draw, random.sample(LENGTHS, 4)), draw(7)])


def test_entries_are_those_of_the_embedded_engine(llm, reference, rounding):
    ids, boundaries = random_prompt()
    ask(llm, ids, boundaries=boundaries)
    prompt = reference.parser.parse(ids, boundaries)
    context = reference.chunk_cache.context_of(prompt)
    assert context == worker_side().cache.context_of(prompt)
    chunks = [prompt.tokens_of(span) for span in prompt.chunks]
    ours = {entry.tokens: entry for info in store().scan() if (entry := stored_entry(info.key)) is not None}
    for chunk, theirs in zip(chunks, reference.chunk_cache.find_or_fill(chunks, context, len(ids)), strict=True):
        entry = ours[chunk]
        assert (entry.format.heads, entry.format.k_dim, entry.format.v_dim) == (1, 512, 64)
        for layer in range(entry.format.layers):
            for mine, yours in zip(entry.layer(layer), theirs.entry.layer(layer), strict=True):
                if is_rough(llm):  # single numbers may be further off
                    assert (mine.float().cpu() - yours).norm() < rounding * yours.norm()
                else:
                    torch.testing.assert_close(mine.float(), yours, atol=rounding, rtol=rounding)


def test_ratio_one_is_plain_vllm(llm, rounding):
    for policy in ("composite", "random"):
        ids, boundaries = random_prompt()
        [ours] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0, policy=policy)
        same(ours, plain_answer(llm, ids), rounding if is_rough(llm) else 1e-3)


POLICIES = [
    "random(seed=3)",
    "sink-link",
    "kv-deviation(layers=1)",
    "kv-deviation(part=v, layers=1)",
    "query-attention",
    "composite(asking=1)",
]


@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_both_engines_choose_the_same_tokens_and_give_the_same_logits(llm, reference, policy):
    if is_rough(llm):
        pytest.skip("in bfloat16 the engines round differently, so their choices may differ")
    ids, boundaries = random_prompt()
    ratio = 0.0 if policy == "none" else 0.4
    with reference.engine.session():
        expected = reference.assemble(reference.parser.parse(ids, boundaries), ratio, 0, policy_named(policy))
    [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=ratio, policy=policy, report=True)
    assert report(output)["mode"] == "fill"
    if ratio:
        assert chosen_last() == expected.recomputed
    logprobs = expected.logits.log_softmax(-1)
    for token, seen in output.outputs[0].logprobs[0].items():
        assert seen.logprob == pytest.approx(float(logprobs[token]), abs=1e-3)


def test_documents_are_reused_in_another_order_under_another_system_prompt(llm):
    documents = [draw(length) for length in LENGTHS]
    ids, boundaries = join([draw(9), *documents, draw(7)])
    ask(llm, ids, boundaries=boundaries)
    ids, boundaries = join([draw(30), *documents[::-1], draw(7)])
    [output] = ask(llm, ids, boundaries=boundaries, report=True)
    assert statuses(output) == ["cached"] * len(LENGTHS)
    assert report(output)["reused_tokens"] == sum(LENGTHS)


def test_exact_prefixes_come_back(llm, rounding):
    """Not to the last bit: vLLM computes a prompt behind a context in another way than a whole one."""
    tokens = draw(2 * PART + 40)
    [first] = ask(llm, tokens)
    forget(llm)
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == 2 * PART
    same(again, first, rounding if is_rough(llm) else 1e-3)
    forget(llm)
    [moved] = ask(llm, [*draw(5), *tokens])
    assert moved.num_cached_tokens == 0


def test_short_runs_come_first(llm, monkeypatch):
    """vLLM reads the latent itself for short runs. For each longer run it projects the latent to all heads."""
    lengths = []
    forward = worker_side().forward
    compute = forward._forward

    def noting(work, *args, **kwargs):
        lengths.append([len(run.tokens) for run in work.runs])
        return compute(work, *args, **kwargs)

    parts = [draw(9), *map(draw, LENGTHS)]
    ids, boundaries = join([*parts, draw(7)])
    ask(llm, ids, boundaries=boundaries)
    monkeypatch.setattr(forward, "_forward", noting)
    ids, boundaries = join([*parts, draw(7)])
    ask(llm, ids, boundaries=boundaries, recompute_ratio=0.3, policy="random")
    blended = max(lengths, key=len)
    assert len(set(blended)) > 1
    assert blended == sorted(blended)


def test_runs_that_begin_a_sequence_have_a_pass_of_their_own(llm):
    """vLLM 0.26 loses the context of the last runs if a run without one comes before them."""
    forward, blocks = worker_side().forward, [[1, 2, 3, 4]]
    runs = [Run(draw(9), 0, blocks), Run(draw(3), 20, blocks), Run(draw(12), 30, blocks)]
    runs += [run._replace(blocks=[[5, 6, 7, 8]]) for run in runs]
    passes = [[run.start for run in work.runs] for work in forward._passes(forward.kv.first_runs_first(runs))]
    assert passes == [[0, 0], [20, 30, 20, 30]]
    [*_, last] = forward._passes([Run(draw(forward.step_tokens + 5), 0, blocks), *runs[:2]])
    assert [run.start for run in last.runs] == [20]


@needs_float32
def test_a_batch_with_preemptions_gives_what_each_request_gives_alone(tiny_deepseek):
    llm = start(tiny_deepseek, num_gpu_blocks_override=60, **SETTINGS | {"max_model_len": 512})
    prompts = [random_prompt() for _ in range(4)]
    alone = [ask(llm, ids, boundaries=spans, max_tokens=60)[0] for ids, spans in prompts]
    scheduler, preempted = core_scheduler(llm), []
    preempt = scheduler._preempt_request

    def noting(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = noting
    params = [greedy(60, logprobs=3, detokenize=False, params={"boundaries": spans}) for _, spans in prompts]
    together = llm.generate([{"prompt_token_ids": ids} for ids, _ in prompts], params, use_tqdm=False)
    for ours, theirs in zip(together, alone, strict=True):
        same(ours, theirs)
    assert preempted


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU")
def test_two_ranks_answer_as_one(tiny_deepseek):
    """Each rank has the whole latent, and one of them stores it."""
    documents, other = [draw(length) for length in LENGTHS], draw(64)
    with EngineApart(tiny_deepseek, ranks=2, **SETTINGS) as engine:
        two = engine.call(answers, documents, other)
    one = answers(start(tiny_deepseek, **SETTINGS), documents, other)
    assert two["heads"] == ["0-0of1", "0-0of1"]
    assert two["all"] == two["plain"] == one["plain"]
    for case in ("filled", "moved", "asked", "checked", "one_rank_forgot", "reused_again"):
        assert two[case][0] == one[case][0], case
