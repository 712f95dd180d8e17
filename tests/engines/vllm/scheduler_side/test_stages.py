"""With pipeline stages, vLLM plans a step while earlier ones are still computed."""

import pytest

from tests.engines.vllm.scheduler_side.fakes import STEP, Side, ask_about, digest_of

CHUNK = list(range(100, 100 + STEP))


def staged(stages: int, **settings) -> Side:
    return Side(shape={"stages": stages, "ranks": stages}, **settings)


@pytest.mark.parametrize(("stages", "is_sliced"), [(1, False), (2, True)])
def test_a_request_in_another_stage_still_runs(stages, is_sliced):
    """A step without it does not mean that it has ended, and the next load must not delay it."""
    side = staged(stages)
    side.store(CHUNK)
    side.run("other")
    side.step()
    assert side.ask(side.add(ask_about(CHUNK, recompute_ratio=0.5, policy="random"))) == (
        side.ours(ask_about(CHUNK)).prompt.question.start,
        is_sliced,
    )


def test_it_runs_no_longer_once_it_is_finished_or_left_out_of_as_many_steps():
    for ending in ("finished", "left out"):
        side = staged(2)
        side.store(CHUNK)
        other = side.add(ask_about(list(range(30)), name="other"))
        side.run("other")
        side.step()
        if ending == "finished":
            side.scheduler.finished(other)
        else:
            side.step()
        assert side.ask(side.add(ask_about(CHUNK, recompute_ratio=0.5, policy="random")))[1] is False


def test_blocks_of_a_long_chunk_are_kept_over_an_empty_step():
    side = staged(2)
    side.ask(side.add(ask_about(list(range(100, 100 + 3 * STEP)), name="first")))
    side.run("first")
    before = side.pool.get_num_free_blocks()
    assert before < 200
    side.step()
    assert side.pool.get_num_free_blocks() == before
    side.step()
    assert side.pool.get_num_free_blocks() == 200


def test_a_chunk_is_stored_when_every_stage_has_its_layers():
    side = staged(3)
    for rank in (0, 2):
        side.store(CHUNK, rank=rank)
    assert not side.scheduler._mirror.has(digest_of(CHUNK))
    side.store(CHUNK, rank=1)
    assert side.scheduler._mirror.has(digest_of(CHUNK))
    side.store(CHUNK, tier=None, rank=2)
    assert not side.scheduler._mirror.has(digest_of(CHUNK))
