"""Where entries come from: host memory, disk, another process; and what happens when there is no room for them."""

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvmosaic.core.rotation import CosSin
from kvmosaic.engines.rotary import turns_for
from kvmosaic.engines.vllm import scheduler
from kvmosaic.hf import LLM as HFEngine
from kvmosaic.kernels.remap import LayerTurn, remap
from kvmosaic.vllm import LLM
from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_engine import DOCUMENTS, answer, plain, prompt, same

WRITER = """
import json, sys
from kvmosaic.vllm import LLM
from tests.engines.vllm.test_engine import answer
request = json.load(sys.stdin)
llm = LLM("smollm2-135m", enable_chunk_cache=True, disk_path=request["disk_path"], **request["options"])
answer(llm, [request["text"]])
llm.llm_engine.engine_core.shutdown()
print("WRITTEN")
"""

OPTIONS = SMALL | {"max_model_len": 1024}


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A disk tier that another engine process filled with all documents."""
    folder = tmp_path_factory.mktemp("entries")
    request = {"disk_path": str(folder), "options": OPTIONS, "text": prompt("You are helpful.", DOCUMENTS)}
    run = subprocess.run(
        [sys.executable, "-c", WRITER], input=json.dumps(request), capture_output=True, text=True, timeout=400
    )
    assert "WRITTEN" in run.stdout, run.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def llm(disk):
    return LLM("smollm2-135m", enable_chunk_cache=True, disk_path=disk, host_memory="60MiB", **OPTIONS)


@pytest.fixture
def worker_side(llm):
    return get_kv_transfer_group()


def forget_fast_copies(worker_side):
    """Back to a process that has seen nothing yet, but the disk."""
    store = worker_side.loader.cache.store
    store.flush()
    for tier in store._stack.tiers[:-1]:
        for info in list(tier.scan()):
            tier.delete(info.key)
            store._stack.index.remove(info.key, tier.name)
            store._stack.policies[tier.name].remove(info.key)


@pytest.fixture
def may_read(llm, worker_side, monkeypatch):
    """Documents are on disk alone, and reading them waits for this event."""
    forget_fast_copies(worker_side)
    plain(llm, ["Hello, this is"])
    disk_tier = worker_side.loader.cache.store._stack.tiers[-1]
    read, event = disk_tier.get, threading.Event()
    monkeypatch.setattr(disk_tier, "get", lambda key: (event.wait(60), read(key))[1])
    yield event
    event.set()


def report(output):
    return output.kv_transfer_params


def test_a_new_process_serves_documents_from_disk(llm):
    """Written by another process; fetched while the request waits; reported as cached, on disk."""
    plain(llm, ["Hello, this is"])  # the scheduler learns with the first step what there is
    before = llm.get_stats()
    [output] = answer(llm, [prompt("Another system prompt.", DOCUMENTS[::-1])], report=True)
    after = llm.get_stats()
    assert after["hits_by_tier"]["disk"] - before["hits_by_tier"]["disk"] == len(DOCUMENTS)
    assert after["cache_misses"] == before["cache_misses"]
    assert [chunk["tier"] for chunk in report(output)["chunks"]] == ["disk"] * len(DOCUMENTS)
    assert output.num_cached_tokens >= report(output)["reused_tokens"] > 90
    [again] = answer(llm, [prompt("Yet another one.", DOCUMENTS)], report=True)
    assert {chunk["tier"] for chunk in report(again)["chunks"]} == {report_fastest()}


def report_fastest():
    return get_kv_transfer_group().loader.cache.store.fastest_tier


def test_a_slow_disk_stalls_nobody_else(llm, may_read):
    """While one request waits for its documents, another one is served from its first to its last token."""
    engine = llm.llm_engine
    sampling = answer_sampling()
    engine.add_request("waits", prompt("You are patient.", DOCUMENTS), sampling)
    engine.add_request("runs", "A plain question: is", sampling)
    order = []
    deadline = time.monotonic() + 50
    while engine.has_unfinished_requests() and time.monotonic() < deadline:
        for output in engine.step():
            if output.finished:
                order.append(output.request_id)
                may_read.set()
    assert order == ["runs", "waits"]


def answer_sampling():
    from vllm import SamplingParams

    return SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


def test_a_request_aborted_while_it_waits_leaves_nothing_pinned(llm, worker_side, may_read):
    engine = llm.llm_engine
    engine.add_request("leaves", prompt("You are impatient.", DOCUMENTS), answer_sampling())
    for _ in range(3):
        engine.step()
    assert worker_side.loader.cache.get_stats()["pinned"] > 0
    engine.abort_request(["leaves"])
    may_read.set()
    plain(llm, ["Hello again, this is"])
    assert worker_side.loader.cache.get_stats()["pinned"] == 0
    text = prompt("You are helpful.", DOCUMENTS)
    same(answer(llm, [text], recompute_ratio=1.0)[0], plain(llm, [text])[0])


def test_a_request_does_not_wait_for_ever(llm, may_read, monkeypatch):
    """The disk does not answer: the request is prefilled, exactly, and says why."""
    monkeypatch.setattr(scheduler, "PATIENCE_SECONDS", 0.5)
    text = prompt("You are in a hurry.", DOCUMENTS)
    [output] = answer(llm, [text], report=True)
    assert report(output) == {"mode": "plain", "fallback_reason": "slow-tier"}
    may_read.set()
    same(output, plain(llm, [text])[0])


def test_blocks_hold_what_the_embedded_engine_would_put_there(llm, worker_side, smollm2, tokenizer, monkeypatch):
    """The remapped KV itself, layer by layer, packed as the backend packs it: compared with the same entry moved by
    the embedded engine's remap (1e-4), and with the embedded engine's own canonical KV moved to the same place, which
    was computed by other kernels (1e-4 of the largest value of the layer)."""
    reference = HFEngine(smollm2, tokenizer, enable_chunk_cache=True)
    loader = worker_side.loader
    forward = loader._forward
    loaded = []
    place = loader._blocks.place

    def spy(moves, blocks, first):
        place(moves, blocks, first)
        loaded.append((moves, blocks))

    monkeypatch.setattr(loader._blocks, "place", spy)
    text = prompt("A system prompt just for this.", [DOCUMENTS[3], DOCUMENTS[1], DOCUMENTS[3]])
    compared = []

    def compare():
        moves, blocks = loaded[-1]
        for entry, position in moves:
            if entry.context != tuple(reference.chunk_cache.sink):
                continue  # the end of the system prompt
            with reference.engine.session():
                [found] = reference.chunk_cache.find_or_fill([entry.tokens], entry.context, 200)
            difference_within(entry, loader.rotary, position, blocks, lambda *rows: 1e-4)
            difference_within(
                found.entry,
                reference.engine._rotary,
                position,
                blocks,
                lambda *rows: 1e-4 * max(part.abs().max() for part in rows),
            )

    def difference_within(entry, rotary, position, blocks, bound):
        kv_format, entry = entry.format, replace(entry, data=entry.data.cpu())
        k, v = (torch.zeros(kv_format.layers, kv_format.heads, 200, kv_format.k_dim) for _ in range(2))
        turns = [
            turn and LayerTurn(turn.columns, CosSin(*(rows.cpu() for rows in turn.turn)))
            for turn in turns_for([(entry, position)], 200, rotary)
        ]
        remap(entry, k, v, position, turns)
        positions = torch.arange(position, position + len(entry.tokens))
        free = max(blocks[0]) + 1  # blocks that nobody uses, for a copy packed by the backend itself
        mirror = [list(range(free, free + len(blocks[0])))]
        mirror_slots = forward.slots(positions.to(forward.device), mirror)
        for index, layer in enumerate(forward.layers):
            cache = layer.kv_cache
            cache[mirror[0]] = cache[list(blocks[0])]
            before = cache[mirror[0]].clone()
            rows = (part[index, :, positions].transpose(0, 1).contiguous().to(forward.device) for part in (k, v))
            forward.write(layer, *rows, mirror_slots)
            difference = float((cache[mirror[0]] - before).abs().max())
            assert difference < bound(k[index], v[index]), f"layer {index}"
            compared.append(difference)

    original = loader.load
    monkeypatch.setattr(loader, "load", lambda load: (original(load), compare()))
    answer(llm, [text])
    assert len(compared) == 2 * 3 * len(forward.layers)
    assert max(compared) > 0, "the mirror was never written"


def test_no_room_in_the_fastest_tier(llm, worker_side):
    """Everything there is pinned: new documents are computed, answered rightly, and stored further down or not."""
    store = worker_side.loader.cache.store
    documents = [f"Report {number}: " + " ".join(DOCUMENTS) for number in range(12)]
    answer(llm, [prompt("You are helpful.", documents[:3])])
    with store.pin([info.key for info in store.scan()]):
        for start in (0, 4, 8):
            text = prompt("You are helpful.", documents[start : start + 4])
            same(answer(llm, [text], recompute_ratio=1.0)[0], plain(llm, [text])[0])
            first, second = (
                answer(llm, [prompt(system, documents[start : start + 4])])[0] for system in ("A.", "A.")
            )
            same(second, first)


def test_a_full_disk(llm, worker_side, caplog):
    """Writes fail; the answers do not, and the failures are counted."""
    before = llm.get_stats()["write_errors"]
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        text = prompt("You are helpful.", ["A document that was never seen before, about " + DOCUMENTS[0]])
        same(answer(llm, [text], recompute_ratio=1.0)[0], plain(llm, [text])[0])
        worker_side.loader.cache.store.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert llm.get_stats()["write_errors"] > before


def test_a_load_that_fails_is_prefilled_instead(llm, worker_side, monkeypatch):
    text = prompt("You are helpful.", DOCUMENTS)
    [expected] = plain(llm, [text])
    monkeypatch.setattr(worker_side.loader._blocks, "place", fail)
    [output] = answer(llm, [prompt("You are helpful.", DOCUMENTS)])
    same(output, expected)


def fail(*args):
    raise RuntimeError("a failure made for this test")
