"""Names of entries when weights change, and the tiers that are used while weights cannot be identified."""

import pytest
import torch
from safetensors.torch import save_file

from kvmosaic.core.config import load_config
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.worker_side.names import EntryNames, logger
from kvmosaic.engines.vllm.worker_side.weights import EngineWeights
from tests.engines.vllm.test_weight_files import config as vllm_config


class OneRank(Ranks):
    """A single rank, without a process group."""

    def __init__(self):
        self.rank, self.count, self._groups = 0, 1, []


class TwoRanks(OneRank):
    """The first of two ranks; the other says what it is told to."""

    theirs: tuple[str | None, str | None] = ("as at the start", None)
    they_have_to_look = False

    def gather(self, mine):
        return [mine, self.theirs]

    def all_have(self, mine):
        return [each and not self.they_have_to_look for each in mine]


class Model(torch.nn.Linear):
    """A model whose weights can be made unreadable."""

    is_hidden = False

    def __init__(self):
        super().__init__(8, 8)

    def named_parameters(self, *args, **kwargs):
        if self.is_hidden:
            raise RuntimeError("packed,\nand nobody knows how")
        return super().named_parameters(*args, **kwargs)

    def load_weights(self, weights):
        self.load_state_dict(dict(weights))


@pytest.fixture
def model():
    return Model()


def names(model, folder=None, **settings):
    """Names of an engine that loaded the files of a folder, or none, and a function that makes it check its weights
    again."""
    loaded = vllm_config("dummy") if folder is None else vllm_config(model=str(folder))
    weights = EngineWeights(loaded, model, OneRank())
    made = EntryNames(load_config(enable_chunk_cache=True, **settings), weights, {}, is_first=True)

    def look(is_hidden=False):
        model.is_hidden = is_hidden
        weights.may_have_changed()
        return made.have_changed()

    return made, look


@pytest.fixture
def errors(monkeypatch):
    """Logged errors. vLLM's loggers pass nothing on to pytest."""
    lines = []
    monkeypatch.setattr(logger, "error", lambda line, *args: lines.append(line % args))
    return lines


def test_names_follow_weights_and_come_back_with_them(model, tmp_path):
    made, look = names(model, disk_path=tmp_path)
    first = made.fingerprint
    assert not look()
    before = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    assert look()
    assert made.fingerprint not in (first, None)
    model.weight.data.copy_(before)
    assert look()
    assert (made.fingerprint, made.tiers) == (first, "all")


def test_weights_that_are_handed_to_the_model_are_looked_at(model):
    """Reinforcement learning does this, without vLLM's workers."""
    made, _ = names(model)
    first = made.fingerprint
    assert not made.have_changed()
    model.load_weights([("weight", torch.zeros(8, 8)), ("bias", torch.zeros(8))])
    assert made.have_changed()
    assert made.fingerprint != first


def test_weights_that_were_handed_over_in_part_are_looked_at(model):
    made, _ = names(model)
    first = made.fingerprint
    with pytest.raises(RuntimeError):
        model.load_weights([("weight", torch.zeros(8, 8)), ("bias", torch.zeros(9))])
    assert made.have_changed()
    assert made.fingerprint != first


def test_weights_of_all_ranks_count(model):
    ranks = TwoRanks()
    weights = EngineWeights(vllm_config("dummy"), model, ranks)
    first = weights.identity
    ranks.theirs = ("others", None)
    assert not weights.have_changed()
    ranks.they_have_to_look = True
    assert weights.have_changed()
    assert weights.is_known
    assert weights.identity != first
    ranks.theirs = (None, "nobody knows how")
    assert weights.have_changed()
    assert (weights.is_known, weights.problem) == (False, "nobody knows how")


def test_names_depend_on_everything_that_entries_are_made_by(model):
    weights = EngineWeights(vllm_config("dummy"), model, OneRank())
    config = load_config(enable_chunk_cache=True)
    made = [EntryNames(config, weights, {"dtype": dtype}, is_first=True) for dtype in ("one", "other", "one")]
    assert made[0].fingerprint == made[2].fingerprint != made[1].fingerprint


def test_files_name_weights_while_these_are_as_they_were_loaded(model, tmp_path, errors):
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    made, look = names(model, tmp_path, disk_path=tmp_path / "store")
    first = made.fingerprint
    model.is_hidden = True
    assert names(model, tmp_path)[0].fingerprint == first  # as in an engine with other shares of the weights
    model.is_hidden = False
    before = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    assert look()
    assert made.fingerprint not in (first, None)
    assert look(is_hidden=True)
    assert (made.fingerprint, made.tiers) == (None, "none")
    assert errors
    model.weight.data.copy_(before)
    assert look()
    assert (made.fingerprint, made.tiers) == (first, "all")


@pytest.mark.parametrize("lasting", ["disk_path", "remote"])
def test_entries_have_no_names_while_weights_are_out_of_sight(model, lasting, tmp_path, errors):
    made, look = names(model, **{lasting: {"disk_path": tmp_path, "remote": "valkey://localhost:1"}[lasting]})
    first = made.fingerprint
    for _ in range(3):
        assert look(is_hidden=True)
        assert (made.fingerprint, made.tiers) == (None, "none")
    [line] = errors
    assert "packed, and nobody knows how" in line
    assert look()
    assert (made.fingerprint, made.tiers) == (first, "all")


def test_an_engine_that_starts_so_does_without_tiers_that_last(model, tmp_path, errors):
    model.is_hidden = True
    made, look = names(model, disk_path=tmp_path, remote="valkey://localhost:1")
    assert (made.config.disk_path, made.config.remote, made.tiers) == (None, None, "memory")
    seen = {made.fingerprint}
    for _ in range(3):
        assert look(is_hidden=True)
        seen.add(made.fingerprint)
    assert len(errors) == 1
    assert len(seen) == 4
    assert None not in seen
    other, _ = names(model, disk_path=tmp_path)
    assert other.fingerprint not in seen
    look()
    assert made.tiers == "memory"


def test_memory_is_used_whatever_the_weights_are(model, errors):
    made, look = names(model)
    seen = {made.fingerprint}
    for _ in range(3):
        look(is_hidden=True)
        assert made.tiers == "all"
        seen.add(made.fingerprint)
    assert len(seen) == 4
    assert not errors
