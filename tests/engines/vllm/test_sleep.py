"""vLLM's sleep mode: an engine that slept gives the same answers, and finds the documents of its disk.

On a CPU, vLLM pauses the engine and resets its caches, but keeps all memory. So tests change the weights themselves
where a GPU loses them."""

import pytest
import torch

from tests.engines.vllm.helpers import ask, close, draw, exact, forget, greedy, join, report, start, statuses, store

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on a GPU needs enable_sleep_mode"),
]

SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True}


@pytest.fixture
def prompt():
    """A prompt with three documents, and its boundaries."""
    return join([draw(21), *(draw(length) for length in (40, 70, 55)), draw(7)])


def asked(llm, prompt):
    ids, boundaries = prompt
    [output] = ask(llm, ids, boundaries=boundaries, report=True)
    return output


def tiers(output):
    return {chunk.get("tier") for chunk in report(output)["chunks"]}


def stored_before(llm, prompt):
    """An answer from stored documents, with nothing in vLLM's own prefix cache afterwards."""
    first = asked(llm, prompt)
    forget(llm)
    again = asked(llm, prompt)
    close(again, first)
    assert (statuses(again), tiers(again)) == (["cached"] * 3, {"host"})
    store().flush()
    return again


def pool_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_the_same_answers_after_sleep(tiny_llama, prompt, tmp_path, has_disk, level):
    llm = start(tiny_llama, **SETTINGS, **({"disk_path": tmp_path} if has_disk else {}))
    before = stored_before(llm, prompt)
    for _ in range(2):
        llm.sleep(level=level)
        assert llm.llm_engine.is_sleeping()
        llm.wake_up()
        assert not llm.llm_engine.is_sleeping()
        after = asked(llm, prompt)
        close(after, before)
        if has_disk:
            assert (statuses(after), tiers(after)) == (["cached"] * 3, {"disk"})
        else:
            assert statuses(after) == ["filled"] * 3
        forget(llm)
        again = asked(llm, prompt)
        close(again, before)
        assert (statuses(again), tiers(again)) == (["cached"] * 3, {"host"})
    assert llm.get_stats()["off_reason"] is None


def lose_weights(worker):
    """Change some of the weights, without notice to anyone, as if their memory had been given away."""
    for name, parameter in worker.model_runner.model.named_parameters():
        if "norm" in name:
            parameter.data.mul_(0.5)


def test_weights_that_are_lost_and_loaded_again(tiny_llama, prompt, tmp_path):
    """Level 2: until they are loaded again, entries of the true weights are not served."""
    llm = start(tiny_llama, **SETTINGS, disk_path=tmp_path)
    before = stored_before(llm, prompt)
    llm.sleep(level=2)
    llm.collective_rpc(lose_weights)
    llm.wake_up()
    lost = asked(llm, prompt)
    assert statuses(lost) == ["filled"] * 3
    assert exact(lost) != exact(before)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": tiny_llama})
    assert llm.reset_prefix_cache()
    close(asked(llm, prompt), before)
    forget(llm)
    after = asked(llm, prompt)
    close(after, before)
    assert statuses(after) == ["cached"] * 3


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_request_that_runs_when_the_engine_goes_to_sleep(tiny_llama, prompt, steps, mode):
    """It is aborted, or computed again after the sleep. Nothing of it is left behind."""
    llm = start(tiny_llama, **SETTINGS)
    before = stored_before(llm, prompt)
    ids, boundaries = prompt
    engine, free = llm.llm_engine, pool_of(llm).get_num_free_blocks()
    sampling = greedy(8, logprobs=3, detokenize=False, params={"boundaries": boundaries, "report": True})
    engine.add_request("running", {"prompt_token_ids": ids}, sampling)
    for _ in range(steps):
        engine.step()
    llm.sleep(level=1, mode=mode)
    llm.wake_up()
    ended = []
    for _ in range(50):
        if not engine.has_unfinished_requests():
            break
        ended += [output for output in engine.step() if output.finished]
    if mode == "keep":
        [output] = ended
        close(output, before)
    else:
        assert all(output.outputs[0].finish_reason == "abort" for output in ended)
        engine.abort_request(["running"])
    assert pool_of(llm).get_num_free_blocks() == free
    close(asked(llm, prompt), before)
    assert not any(info.pinned for info in store().scan())
