"""The scheduler's view of the workers' stores."""

import pytest

from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import RankReport
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror


def report(mirror, rank, fastest="host", **changes):
    changed = {name.encode(): tier for name, tier in changes.items()}
    mirror.update(RankReport(rank=rank, fastest=fastest, changes=changed, fetched={}, costs={}, is_off=False))


def test_after_a_clear_it_is_complete_when_all_ranks_have_listed_their_entries_again():
    mirror = StoreMirror(2)
    for rank in range(2):
        report(mirror, rank, a="disk")
    assert mirror.is_complete
    mirror.clear()
    report(mirror, 0, b="host")  # of a step that was planned before
    assert not mirror.is_complete
    for rank in range(2):
        assert not mirror.is_complete
        mirror.update(
            RankReport(
                rank=rank, fastest="host", changes={b"a": "disk"}, fetched={}, costs={}, is_off=False, is_all=True
            )
        )
    assert mirror.is_complete
    assert (mirror.tier(b"a"), mirror.has(b"b")) == ("disk", False)


def test_one_rank_that_does_not_know_its_weights_counts_for_all():
    mirror = StoreMirror(2)
    for rank, tiers in enumerate(("all", "none")):
        mirror.update(
            RankReport(rank=rank, fastest="host", changes={}, fetched={}, costs={}, is_off=False, tiers=tiers)
        )
    assert mirror.off_reason is Fallback.WEIGHTS


@pytest.mark.parametrize("tiers", ["all", "memory"])
@pytest.mark.parametrize("has_company", [False, True])
@pytest.mark.parametrize(("has_remote", "has_disk"), [(False, False), (True, False), (False, True), (True, True)])
def test_others_may_have_stored_what_a_rank_does_not_know(has_remote, has_disk, has_company, tiers):
    """A busy engine asks its disk only if somebody else was seen to write to it."""
    mirror = StoreMirror(2, has_remote=has_remote, has_disk=has_disk)

    def tell(rank, **news):
        mirror.update(RankReport(rank=rank, fastest="host", changes={}, fetched={}, costs={}, is_off=False, **news))

    tell(0, has_company=has_company)
    tell(1, tiers=tiers)
    is_usable = tiers == "all"
    assert mirror.may_lag_behind_others(is_alone=True) is (is_usable and (has_remote or has_disk))
    tell(0)  # what was once seen is remembered
    is_asked = has_remote or (has_disk and has_company)
    assert mirror.may_lag_behind_others(is_alone=False) is (is_usable and is_asked)


def test_a_chunk_can_be_stored_if_every_rank_has_room_for_it():
    mirror = StoreMirror(2)
    assert mirror.can_store(10**9)
    for rank, most in enumerate((None, 100)):
        report = RankReport(
            rank=rank, fastest="host", changes={}, fetched={}, costs={}, is_off=False, max_stored_tokens=most
        )
        mirror.update(report)
    assert (mirror.can_store(100), mirror.can_store(101)) == (True, False)


def test_it_is_complete_when_every_rank_has_told():
    mirror = StoreMirror(2)
    report(mirror, 1)
    report(mirror, 1)
    assert not mirror.is_complete
    report(mirror, 0)
    assert mirror.is_complete


def test_an_entry_is_there_when_every_rank_has_it():
    mirror = StoreMirror(2)
    report(mirror, 0, a="host")
    assert not mirror.has(b"a")
    report(mirror, 1, a="host")
    assert mirror.has(b"a")
    report(mirror, 0, a=None)
    assert not mirror.has(b"a")
    report(mirror, 0, a=None)  # twice does no harm


def test_an_entry_is_in_the_slowest_tier_of_all_ranks():
    mirror = StoreMirror(2)
    report(mirror, 0, a="host", b="disk")
    report(mirror, 1, a="disk", b="disk")
    assert (mirror.tier(b"a"), mirror.tier(b"b"), mirror.tier(b"c")) == ("disk", "disk", None)
    assert not mirror.is_near(b"a")
    report(mirror, 1, a="host")
    assert mirror.tier(b"a") == "host"
    assert mirror.is_near(b"a")
    assert not mirror.is_near(b"c")


def test_the_fastest_tier_is_that_of_the_rank():
    mirror = StoreMirror(2)
    report(mirror, 0, "device", a="device", b="host")
    report(mirror, 1, "device", a="device", b="host")
    assert mirror.is_near(b"a")
    assert not mirror.is_near(b"b")
