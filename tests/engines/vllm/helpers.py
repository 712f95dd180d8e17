"""Helpers of the tests of the vLLM engine: engines, prompts, comparisons. Only this file depends on the engine's
internals."""

import platform
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import RequestOutput, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvmosaic.blend import choose
from kvmosaic.core.config import load_config
from kvmosaic.engines.vllm.compat.weights import loaded_model
from kvmosaic.engines.vllm.paged.pair_reader import block_reader
from kvmosaic.engines.vllm.scheduler_side import backlog, patience, waiting
from kvmosaic.engines.vllm.worker_side import blender
from kvmosaic.vllm import LLM

ROOT = Path(__file__).parents[3]

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "num_gpu_blocks_override": 512,
    "disable_log_stats": False,
}
"""Small blocks, so that short prompts fill several, because only full blocks enter the prefix cache. There are few,
because an engine fills them with zeros when it starts."""
if torch.cuda.is_available():
    SMALL["gpu_memory_utilization"] = 0.2  # what an engine leaves behind must fit beside the next one

SEPARATOR = " # # "
OURS: dict[str, Any] = {"client_parameters": "all", "min_chunk_tokens": 1, "chunk_separator": SEPARATOR}
"""Settings of the chunk cache in tests that do not choose others."""
PART = 256
"""Tokens of an entry of an exact prefix, in a model without sliding windows."""
HAS_AMX = (
    not torch.cuda.is_available()
    and hasattr(AttentionBackendEnum, "AMX_MLA")
    and platform.machine() == "x86_64"
    and torch.cpu._is_amx_tile_supported()
)
"""Whether vLLM would choose its kernel of latent attention for new Xeons, which supports bfloat16 only."""
LATENT: dict[str, Any] = {"block_size": 16} | ({"attention_backend": "CPU_MLA"} if HAS_AMX else {})
"""Settings for latent attention in float32: vLLM's kernel for all CPUs takes 16 tokens per block."""


def start(model: str | Path, **settings: Any) -> LLM:
    """An engine with a chunk cache, in this process; it ends the engine that was started before (``conftest.py``)."""
    return LLM(str(model), enable_chunk_cache=True, **SMALL | OURS | settings)


# --- prompts of text

DOCUMENTS = [
    "The ferry Cormorant connects Port Almery with Sill Island four times a day; the first boat leaves at 6:40.",
    "The Old Kiln Bakery on Lantern Street is owned by Tomas Reed, who learned the trade from his aunt.",
    "The library is closed on Mondays. Its head librarian is Miriam Okafor, who came eleven years ago.",
    "Stormcap is a blue goat cheese that ripens for five months in a cave behind the quarry.",
]


def prompt(system: str, documents: Sequence[str], question: str = "Tell me about it. It is") -> str:
    return SEPARATOR.join([system, *documents, question])


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Greedy sampling of a fixed number of tokens, with ``params`` as request parameters."""
    params = more.pop("params", None)
    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra, **more)


def answer(llm: LLM, texts: Sequence[Any], **params: Any) -> list[RequestOutput]:
    """Answers to texts that are sent together."""
    return llm.generate(texts, greedy(10, logprobs=1, params=params), use_tqdm=False)


def answer_each(llm: LLM, texts: Sequence[Any], parameters: Sequence[dict[str, Any]]) -> list[RequestOutput]:
    """Answers to texts that are sent together, each with its own parameters."""
    return llm.generate(texts, [greedy(10, logprobs=1, params=each) for each in parameters], use_tqdm=False)


def plain(llm: LLM, texts: Sequence[Any]) -> list[RequestOutput]:
    """Answers without the chunk cache."""
    return answer(llm, texts, chunk_cache=False)


# --- prompts of tokens


def draw(count: int, vocabulary: int = 500) -> list[int]:
    """Random tokens, none of the first ten, which may be special."""
    return [random.randrange(10, vocabulary) for _ in range(count)]


def join(parts: Sequence[Sequence[int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt of these parts, and its boundaries."""
    ids: list[int] = []
    boundaries = []
    for part in parts:
        boundaries.append((len(ids), len(ids) + len(part)))
        ids += part
    return ids, boundaries


def ask(
    llm: LLM, *prompts: Sequence[int], max_tokens: int = 8, salt: str | None = None, **params: Any
) -> list[RequestOutput]:
    """Answers to prompts that are sent together."""
    given = [{"prompt_token_ids": list(tokens)} | ({"cache_salt": salt} if salt else {}) for tokens in prompts]
    return llm.generate(given, greedy(max_tokens, logprobs=3, detokenize=False, params=params), use_tqdm=False)


def plain_answer(llm: LLM, tokens: Sequence[int]) -> RequestOutput:
    """The answer of a full prefill, with nothing from vLLM's own prefix cache."""
    assert llm.reset_prefix_cache()
    [output] = ask(llm, tokens, salt=f"{random.random()}", chunk_cache=False)
    return output


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a failure made for this test")


def forget(llm: LLM) -> None:
    """Have the last request's KV stored, then empty only vLLM's own prefix cache."""
    ask(llm, draw(5))
    assert llm.reset_prefix_cache()


# --- comparisons


def same(ours: RequestOutput, theirs: RequestOutput, tolerance: float = 1e-3) -> None:
    """Check that two answers have the same tokens, with the same probabilities up to rounding."""
    mine, yours = ours.outputs[0], theirs.outputs[0]
    assert mine.token_ids == yours.token_ids
    for step, other in zip(mine.logprobs, yours.logprobs, strict=True):
        for token in step.keys() & other.keys():
            assert step[token].logprob == pytest.approx(other[token].logprob, abs=tolerance)


Exact = tuple[list[int], list[dict[int, float]]]
"""Tokens of an answer, and the probabilities of the likeliest tokens at each step."""


def exact(output: RequestOutput) -> Exact:
    """The tokens of an answer and the probabilities of the likeliest tokens, for comparison to the last bit."""
    said = output.outputs[0]
    return list(said.token_ids), [{token: each.logprob for token, each in step.items()} for step in said.logprobs]


def close(ours: RequestOutput, theirs: RequestOutput) -> None:
    """Check that two answers have the same tokens. Numbers that were computed in other pieces may be rounded
    differently."""
    near(exact(ours), exact(theirs))


def near(ours: Exact, theirs: Exact) -> None:
    """Check the same of what :func:`exact` returned for two answers."""
    (mine, mine_steps), (yours, yours_steps) = ours, theirs
    assert mine == yours
    for token, a, b in zip(mine, mine_steps, yours_steps, strict=True):
        assert a[token] == pytest.approx(b[token], abs=1e-3)


def as_before(again: RequestOutput, before: RequestOutput) -> None:
    """Check that answers are equal to the last bit, or on a GPU up to rounding, which depends on how many tokens are
    computed at once."""
    if torch.cuda.is_available():
        close(again, before)
    else:
        assert exact(again) == exact(before)


def report(output: RequestOutput) -> dict[str, Any]:
    """The report of a request that asked for one."""
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def statuses(output: RequestOutput) -> list[str]:
    """The status of each chunk of a request that asked for a report."""
    return [chunk["status"] for chunk in report(output)["chunks"]]


# --- inside the engine: the worker's side


def worker_side() -> Any:
    """The worker side of the engine that was started last in this process."""
    return get_kv_transfer_group().worker


def model_config() -> Any:
    """vLLM's ``ModelConfig``, as the worker has it."""
    return get_kv_transfer_group()._vllm_config.model_config


def store() -> Any:
    """The chunk store of this process's worker."""
    return worker_side().cache.store


def fast_tiers() -> list[Any]:
    """All tiers but the last one, fastest first."""
    return list(store()._stack.tiers[:-1])


def slowest_tier() -> Any:
    return store()._stack.tiers[-1]


def stored_entry(key: Any) -> Any:
    """An entry in the fastest tier, if it is there."""
    return store()._stack.tiers[0].get(key)


def forget_fast_copies() -> None:
    """Empty all tiers but the slowest, as in a process that has just started."""
    stack = store()._stack
    store().flush()
    for tier in fast_tiers():
        for info in list(tier.scan()):
            tier.delete(info.key)
            stack.index.remove(info.key, tier.name)
            stack.policies[tier.name].remove(info.key)


def note_readers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that read the slowest tier from now on, one item for each entry."""
    tier, readers = slowest_tier(), list[threading.Thread]()
    read = tier.get

    def noting(key: Any) -> Any:
        readers.append(threading.current_thread())
        return read(key)

    monkeypatch.setattr(tier, "get", noting)
    return readers


def paged_caches() -> list[torch.Tensor]:
    """vLLM's KV cache, layer by layer."""
    return [layer.cache for layer in worker_side().forward.kv.layers]


def fill_alone(context: Sequence[int], tokens: Sequence[int]) -> Any:
    """Canonical K and V of one chunk, computed in unused blocks."""
    side = worker_side()
    blocks = [list(range(1, 40)) for _ in side.forward.kv.block_sizes]
    [packed] = side.paged.fill(context, [tokens], blocks, side.paged.format)
    return packed.layers()


def fill_in_background(fills: Sequence[Any]) -> None:
    worker_side()._filler.fill_in_background(fills, None, can_store=True)


def note_fills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Contexts and chunks that the worker fills from now on."""
    filled: list[tuple[Any, Any]] = []
    filler = worker_side()._filler
    fill = filler.fill

    def noting(chunks: Any, context: Any, *rest: Any) -> Any:
        filled.append((context, chunks))
        return fill(chunks, context, *rest)

    monkeypatch.setattr(filler, "fill", noting)
    return filled


def note_loads(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> list[int]:
    """Number of requests that each step loads from now on. ``then`` is called after each step."""
    counts: list[int] = []
    loader = worker_side().loader
    load = loader.load

    def noting(loads: Sequence[Any], *rest: Any) -> Any:
        result = load(loads, *rest)
        counts.append(len(loads))
        then()
        return result

    monkeypatch.setattr(loader, "load", noting)
    return counts


def note_placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Entries that are placed from now on, with their positions and blocks."""
    placed: list[tuple[Any, Any]] = []
    blocks = worker_side().paged
    place = blocks.place

    def noting(moves: Any, into: Any, first: int) -> Any:
        result = place(moves, into, first)
        placed.append((moves, into))
        return result

    monkeypatch.setattr(blocks, "place", noting)
    return placed


def note_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs of each pass of the sparse forward from now on. All go through the backend."""
    forward = worker_side().forward
    counts: list[int] = []
    compute = forward._forward

    def counted(work: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(work.runs))
        return compute(work, *args, **kwargs)

    monkeypatch.setattr(forward, "_forward", counted)
    monkeypatch.setattr(forward, "_in_tiles", lambda runs: False)
    return counts


def note_adapters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """vLLM's number of the adapter of each pass of the sparse forward from now on; 0 for none."""
    forward = worker_side().forward
    numbers: list[int] = []
    compute = forward._forward

    def noted(work: Any, *args: Any, **kwargs: Any) -> Any:
        numbers.append(work.adapter_id)
        return compute(work, *args, **kwargs)

    monkeypatch.setattr(forward, "_forward", noted)
    return numbers


def adapter_manager() -> Any:
    """vLLM's adapter manager."""
    return worker_side().forward._runner.lora_manager._adapter_manager


def limit_runs(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Limit the number of runs of a pass."""
    monkeypatch.setattr(worker_side().forward._metadata, "max_runs", most)


def measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent costs from being learnt: on a busy machine, moving KV may take longer than computing it with a tiny
    model, and requests would rightly be served plainly."""
    monkeypatch.setattr(worker_side().timer, "_observe", lambda stage, tokens, seconds: None)


def forget_costs(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Forget all learnt costs, and prevent more from being learnt: those of a busy machine may leave a step room for
    one request only."""
    measure_nothing(monkeypatch)
    monkeypatch.setattr(scheduler_side(llm)._admission, "_costs", {})


def learn_nothing(worker: Any) -> None:
    """Prevent costs from being learnt on a rank, permanently."""
    worker_side().timer._observe = lambda stage, tokens, seconds: None


def chosen_last() -> tuple[int, ...]:
    """The tokens that the worker's policy chose for the latest prompt."""
    choices = worker_side().blender._choices
    return tuple(choices[next(reversed(choices))].positions.tolist())


def kept_last() -> tuple[tuple[int, ...], ...] | None:
    """The tokens that each check kept of the latest prompt, if the set shrank."""
    choices = worker_side().blender._choices
    kept = choices[next(reversed(choices))].kept
    return None if kept is None else tuple(tuple(each.tolist()) for each in kept)


def forget_kept() -> None:
    """Remember no choices."""
    worker_side().blender.clear()


def reads_blocks() -> Callable[[Sequence[int], int], tuple[torch.Tensor, torch.Tensor]]:
    """A function that reads K and V ``[layers, heads, tokens, dim]`` of the first tokens of a sequence, by its blocks
    and their number. To be called before the engine's first request."""
    side = worker_side()
    reader = block_reader(side.forward.kv, side.paged.format.dtype)
    assert reader is not None

    def read(blocks: Sequence[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = reader.read(blocks, 0, count)
        return k.transpose(0, 1), v.transpose(0, 1)

    return read


def note_choices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The prompts that policies are asked about from now on, as they see them, and their selections."""
    noted: list[tuple[Any, Any]] = []

    def noting(policy: Any, assembled: Any, ratio: float) -> Any:
        selection = choose(policy, assembled, ratio)
        noted.append((assembled, selection))
        return selection

    monkeypatch.setattr(blender, "choose", noting)
    return noted


def hooked_modules() -> int:
    """Number of the model's modules that have hooks before their forward."""
    model = loaded_model(worker_side().forward._runner)
    return sum(bool(module._forward_pre_hooks) for module in model.modules())


def has_measured_layers() -> bool:
    """Whether the worker measured the model's decoder layers."""
    return worker_side().loader._narrower._is_measured


# --- inside the engine: the scheduler's side


def core_scheduler(llm: LLM) -> Any:
    """vLLM's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def block_pool(llm: LLM) -> Any:
    return core_scheduler(llm).kv_cache_manager.block_pool


def scheduler_side(llm: LLM) -> Any:
    return core_scheduler(llm).connector.scheduler


def is_idle(llm: LLM) -> bool:
    """Whether the scheduler side remembers no request."""
    side = scheduler_side(llm)
    return not side._requests and not side._loads.in_slices


def waiting_fills(llm: LLM) -> int:
    """Chunks that wait to be filled in the background."""
    return len(scheduler_side(llm)._backlog)


def has_company(llm: LLM) -> bool:
    """Whether the scheduler was told that another process writes to the disk."""
    return scheduler_side(llm)._mirror._has_company


def learnt_costs(llm: LLM) -> Any:
    """Costs of the first rank: by stage, the seconds as a line over tokens."""
    return scheduler_side(llm)._admission._costs[0]


def add_cost(monkeypatch: pytest.MonkeyPatch, llm: LLM, more: int) -> None:
    """Make every request cost more, by a number of tokens."""
    admission = scheduler_side(llm)._admission
    count, cost = admission.tokens_to_compute, admission._load_cost

    def dearer(request: Any, local: int) -> Any:
        found = cost(request, local)
        return found._replace(rest=found.rest + more)

    monkeypatch.setattr(admission, "tokens_to_compute", lambda request, local: count(request, local) + more)
    monkeypatch.setattr(admission, "_load_cost", dearer)


def lend_nothing(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Lend no blocks, as when vLLM has too few."""
    monkeypatch.setattr(scheduler_side(llm)._lender, "lend", lambda *_: ())


def choose_at_any_length(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Let policies probe prompts even if that takes more than a step."""
    monkeypatch.setattr(scheduler_side(llm)._admission, "choice_is_long", lambda *_: False)


def set_miss_policy(monkeypatch: pytest.MonkeyPatch, llm: LLM, policy: str) -> None:
    """Set ``miss_policy`` on the scheduler side only, for chunks that it notes as missing."""
    config = load_config(enable_chunk_cache=True, miss_policy=policy, client_parameters="all")
    side = scheduler_side(llm)
    for part in (side, side._waiting):
        monkeypatch.setattr(part, "_config", config)
    for part in (side._admission, side._lender):
        monkeypatch.setattr(part, "_fills_first", policy == "fill-first")


def judge_once(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[bool]:
    """Have every request judged twice. Only the first of all judgements is in favour of reuse. Returns a list with an
    item for each judgement."""
    side = scheduler_side(llm)
    judged: list[bool] = []
    judge = side._waiting._is_worth_it

    def is_faster(*_: Any) -> bool:
        judged.append(True)
        return len(judged) == 1

    monkeypatch.setattr(side._admission._judge, "is_faster", is_faster)
    monkeypatch.setattr(side._waiting, "_is_worth_it", lambda *given: judge(*given) and judge(*given))
    return judged


def set_patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set how long a request waits for its chunks, whatever was measured."""
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", seconds)
    for name in ("MOST_SECONDS", "LEAST_SECONDS"):
        monkeypatch.setattr(patience, name, seconds)


def set_overdue(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set how long a chunk waits for a step that computes no prompts."""
    monkeypatch.setattr(backlog, "OVERDUE_SECONDS", seconds)
