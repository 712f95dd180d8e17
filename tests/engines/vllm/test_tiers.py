"""Entries from host memory, disk or another process, and the behaviour when there is no room for them."""

import resource
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmosaic.core.rotation import CosSin
from kvmosaic.engines.rotary import turns_for
from kvmosaic.hf import LLM as HFEngine
from kvmosaic.kernels.remap import LayerTurn, remap
from tests.engines.vllm.helpers import (
    DOCUMENTS,
    OURS,
    answer,
    forget,
    forget_fast_copies,
    greedy,
    note_fills,
    note_loads,
    note_placed,
    note_readers,
    plain,
    prompt,
    report,
    same,
    set_patience,
    slowest_tier,
    start,
    store,
    waiting_fills,
    worker_side,
)

pytestmark = pytest.mark.engine

OPTIONS = {"max_model_len": 1024, "miss_policy": "fill-first"}


@pytest.fixture(scope="module")
def disk(tmp_path_factory, tiny_text):
    """A disk tier that another engine filled with all documents."""
    folder = tmp_path_factory.mktemp("entries")
    other = start(tiny_text, disk_path=folder, **OPTIONS)
    answer(other, [prompt("You are helpful.", DOCUMENTS)])
    return folder


@pytest.fixture(scope="module")
def llm(disk, tiny_text):
    return start(tiny_text, disk_path=disk, host_memory="10MiB", **OPTIONS)


@pytest.fixture
def may_read(llm, monkeypatch):
    """Documents are on disk only, and reading them waits for this event."""
    forget_fast_copies()
    plain(llm, ["Hello, this is"])
    disk_tier = slowest_tier()
    read, event = disk_tier.get, threading.Event()
    monkeypatch.setattr(disk_tier, "get", lambda key: (event.wait(60), read(key))[1])
    yield event
    event.set()


def test_a_new_engine_serves_documents_from_disk(llm):
    """Documents that another engine wrote are fetched while the request waits, and reported as cached on disk."""
    plain(llm, ["Hello, this is"])  # with the first step the scheduler learns what is stored
    before = llm.get_stats()
    [output] = answer(llm, [prompt("Another system prompt.", DOCUMENTS[::-1])], report=True)
    after = llm.get_stats()
    assert after["hits_by_tier"]["disk"] - before["hits_by_tier"]["disk"] == len(DOCUMENTS)
    assert after["cache_misses"] == before["cache_misses"]
    assert [chunk["tier"] for chunk in report(output)["chunks"]] == ["disk"] * len(DOCUMENTS)
    assert output.num_cached_tokens >= report(output)["reused_tokens"] > 90
    [again] = answer(llm, [prompt("Yet another one.", DOCUMENTS)], report=True)
    assert {chunk["tier"] for chunk in report(again)["chunks"]} == {store().fastest_tier}


def test_a_slow_disk_stalls_nobody_else(llm, may_read):
    """While one request waits for its documents, another one is served completely."""
    engine = llm.llm_engine
    sampling = greedy(10)
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


def test_a_reset_empties_memory_and_leaves_the_disk_to_others(llm):
    """vLLM resets the connector when it goes to sleep. Then the scheduler learns again which entries the disk has."""
    answer(llm, [prompt("You are helpful.", DOCUMENTS)])
    assert store().get_stats()["current_memory_mb"] > 0
    assert llm.reset_prefix_cache(reset_connector=True)
    [output] = answer(llm, [prompt("After the reset.", DOCUMENTS)], report=True)
    assert [chunk["tier"] for chunk in report(output)["chunks"]] == ["disk"] * len(DOCUMENTS)


def test_no_step_reads_the_disk_itself(llm, monkeypatch):
    """Documents are on disk only, and the scheduler does not know them, so they are filled and not waited for."""
    answer(llm, [prompt("You have a disk.", DOCUMENTS)])
    forget_fast_copies()
    readers, before = note_readers(monkeypatch), llm.get_stats()["misses_by_reason"]["slow-tier"]
    text = prompt("You are in a step.", DOCUMENTS)
    same(answer(llm, [text], recompute_ratio=1.0)[0], plain(llm, [text])[0])
    assert llm.get_stats()["misses_by_reason"]["slow-tier"] == before + len(DOCUMENTS)
    assert threading.current_thread() not in readers


def test_a_request_aborted_while_it_waits_leaves_nothing_pinned(llm, may_read):
    engine = llm.llm_engine
    engine.add_request("leaves", prompt("You are impatient.", DOCUMENTS), greedy(10))
    for _ in range(3):
        engine.step()
    assert worker_side().cache.get_stats()["pinned"] > 0
    engine.abort_request(["leaves"])
    may_read.set()
    plain(llm, ["Hello again, this is"])
    assert worker_side().cache.get_stats()["pinned"] == 0
    text = prompt("You are helpful.", DOCUMENTS)
    same(answer(llm, [text], recompute_ratio=1.0)[0], plain(llm, [text])[0])


def test_a_request_does_not_wait_for_ever(llm, may_read, monkeypatch):
    """If the disk does not answer, the request is prefilled exactly and reports the reason."""
    set_patience(monkeypatch, 0.5)
    text = prompt("You are in a hurry.", DOCUMENTS)
    [output] = answer(llm, [text], report=True)
    assert (report(output)["mode"], report(output)["fallback_reason"]) == ("plain", "slow-tier")
    assert {chunk["reason"] for chunk in report(output)["chunks"]} == {"slow-tier"}
    may_read.set()
    same(output, plain(llm, [text])[0])


def test_blocks_hold_what_the_embedded_engine_would_put_there(llm, tiny_text, tokenizer, monkeypatch):
    """The remapped KV itself is compared layer by layer, packed as the backend packs it: with the same entry moved by
    the embedded engine's remap (1e-4), and with the embedded engine's own canonical KV moved to the same place, which
    other kernels computed (1e-4 of the largest value of the layer)."""
    model = AutoModelForCausalLM.from_pretrained(tiny_text).eval()
    reference = HFEngine(model, tokenizer, enable_chunk_cache=True, miss_policy="fill-first", **OURS)
    kv, loaded = worker_side().forward.kv, note_placed(monkeypatch)
    text = prompt("A system prompt just for this.", [DOCUMENTS[3], DOCUMENTS[1], DOCUMENTS[3]])
    compared = []

    def compare():
        if not loaded:
            return  # a step that has documents fetched
        moves, blocks = loaded[-1]
        for entry, position in moves:
            if entry.context != tuple(reference.chunk_cache.sink):
                continue  # the end of the system prompt
            with reference.engine.session():
                [found] = reference.chunk_cache.find_or_fill([entry.tokens], entry.context, 200)
            difference_within(entry, worker_side().rotary, position, blocks, lambda *rows: 1e-4)
            difference_within(
                found.entry,
                reference.engine.rotary,
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
        free = max(blocks[0]) + 1  # unused blocks, for a copy packed by the backend itself
        mirror = [list(range(free, free + len(blocks[0])))]
        mirror_slots = kv.slots(positions.to(kv.device), mirror)
        for index, layer in enumerate(kv.layers):
            cache = layer.cache
            cache[mirror[0]] = cache[list(blocks[0])]
            before = cache[mirror[0]].clone()
            rows = (part[index, :, positions].transpose(0, 1).contiguous().to(kv.device) for part in (k, v))
            kv.write(layer, *rows, mirror_slots)
            difference = float((cache[mirror[0]] - before).abs().max())
            assert difference < bound(k[index], v[index]), f"layer {index}"
            compared.append(difference)

    note_loads(monkeypatch, then=compare)
    answer(llm, [text])
    assert len(compared) == 2 * 3 * len(kv.layers)
    assert max(compared) > 0, "the mirror was never written"


def test_no_room_in_the_fastest_tier(llm):
    """Everything in that tier is pinned. New documents are computed, answers are right, and the documents may be
    stored in slower tiers."""
    documents = [f"Report {number}: " + " ".join(DOCUMENTS) for number in range(12)]
    answer(llm, [prompt("You are helpful.", documents[:3])])
    with store().pin([info.key for info in store().scan()]):
        for at in (0, 4, 8):
            text = prompt("You are helpful.", documents[at : at + 4])
            same(answer(llm, [text], recompute_ratio=1.0)[0], plain(llm, [text])[0])
            first, second = (answer(llm, [prompt(system, documents[at : at + 4])])[0] for system in ("A.", "A."))
            same(second, first)


def test_a_full_disk(llm):
    """Writes fail and are counted, but answers are right."""
    before = llm.get_stats()["write_errors"]
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        text = prompt("You are helpful.", ["A document that was never seen before, about " + DOCUMENTS[0]])
        same(answer(llm, [text], recompute_ratio=1.0)[0], plain(llm, [text])[0])
        store().flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert llm.get_stats()["write_errors"] > before


def test_a_load_that_fails_is_prefilled_instead(llm, monkeypatch):
    text = prompt("You are helpful.", DOCUMENTS)
    [expected] = plain(llm, [text])
    forget(llm)  # blocks of an earlier prompt with the same chunks are approximate
    monkeypatch.setattr(worker_side().paged, "place", fail)
    [output] = answer(llm, [text])
    same(output, expected)


def fail(*args):
    raise RuntimeError("a failure made for this test")


@pytest.mark.parametrize("policy", ["background", "fill-first"])
def test_a_document_that_is_too_long_for_the_store_is_text_of_its_prompts(tiny_text, policy, monkeypatch):
    small = {"host_memory": "512KiB", "chunk_cache_gpu_memory_fraction": 0.0}
    llm = start(tiny_text, **OPTIONS | {"miss_policy": policy} | small)
    long = " ".join(DOCUMENTS * 3)
    short = DOCUMENTS[0]
    longest = worker_side().cache.max_stored_tokens
    encode = llm.get_tokenizer().encode
    assert len(encode(short)) < longest < len(encode(long))
    filled = note_fills(monkeypatch)
    for number in range(3):
        text = prompt(f"You are number {number}.", [short, long])
        [output] = answer(llm, [text], report=True)
        assert report(output)["chunks"][1]["status"] == "prefilled"
    same(answer(llm, [prompt("Another one.", [long])])[0], plain(llm, [prompt("Another one.", [long])])[0])
    lengths = [len(tokens) for _, chunks in filled for tokens in chunks.values()]
    if torch.cuda.is_available():  # there, later requests filled the short document again
        assert len(set(lengths)) == 1
    else:
        assert len(lengths) == 1
    assert lengths[0] <= longest
    assert worker_side()._filler._half_filled is None  # and not in slices
    assert waiting_fills(llm) == 0
