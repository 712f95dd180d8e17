"""Files of learned sinks: written files can be read, and all others are refused in one line."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.learned_sink import WITNESS_TOKENS, LearnedSink, SinkAbout, witness_tokens
from kvmosaic.models.sink_file import load_sink, save_sink

ABOUT = SinkAbout(model="tiny", data=["a.txt"], recipe={"steps": 3}, kl_before=0.2, kl_after=0.1, kvmosaic="1")
SHAPE = (3, 4, 8, 6)
"""Numbers of layers, heads, tokens and columns."""


def random_sink():
    return LearnedSink(torch.randn(SHAPE), torch.randn(*SHAPE[:3], 5), torch.randn(4, WITNESS_TOKENS, 5), ABOUT)


def test_a_file_holds_all_of_it(tmp_path):
    sink = random_sink()
    save_sink(sink, tmp_path / "sink")
    found = load_sink(tmp_path / "sink")
    assert all(torch.equal(getattr(found, name), getattr(sink, name)) for name in ("k", "v", "witness"))
    assert (found.about, found.digest, found.tokens) == (sink.about, sink.digest, (-1,) * 8)
    assert [path.name for path in tmp_path.iterdir()] == ["sink"]


def test_a_new_file_is_read_anew(tmp_path):
    for sink in (random_sink(), random_sink()):
        save_sink(sink, tmp_path / "sink")
        assert load_sink(tmp_path / "sink").digest == sink.digest


def test_one_number_makes_another_digest():
    sink = random_sink()
    other = sink.v.clone()
    other.view(-1)[int(torch.randint(other.numel(), ()))] += 1
    assert LearnedSink(sink.k, other, sink.witness, ABOUT).digest != sink.digest


def test_ranks_hold_their_heads():
    sink = random_sink()
    k, v = sink.kv(torch.float16, torch.device("cpu"), slice(1, 3))
    assert torch.equal(k, sink.k[:, 1:3].transpose(0, 1).half())
    assert torch.equal(v, sink.v[:, 1:3].transpose(0, 1).half())


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-7])


def other_format(path):
    save_file({"k": torch.zeros(1)}, path, {"kvmosaic_sink_format": "2"})


def no_about(path):
    save_file({name: torch.zeros(SHAPE) for name in ("k", "v", "witness")}, path, {"kvmosaic_sink_format": "1"})


def bad_about(path):
    tensors = {name: torch.zeros(SHAPE) for name in ("k", "v", "witness")}
    save_file(tensors, path, {"kvmosaic_sink_format": "1", "about": json.dumps({"model": 3})})


def not_finite(path):
    sink = random_sink()
    tensors = {"k": sink.k / 0, "v": sink.v, "witness": sink.witness}
    save_file(tensors, path, {"kvmosaic_sink_format": "1", "about": ABOUT.model_dump_json()})


def other_witness(path):
    sink = random_sink()
    tensors = {"k": sink.k, "v": sink.v, "witness": sink.witness[:2]}
    save_file(tensors, path, {"kvmosaic_sink_format": "1", "about": ABOUT.model_dump_json()})


def text(path):
    path.write_text("no sink")


def gone(path):
    path.unlink()


@pytest.mark.parametrize(
    "damage", [cut_short, other_format, no_about, bad_about, not_finite, other_witness, text, gone]
)
def test_what_is_no_sink_is_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "sink"
    save_sink(random_sink(), path)
    damage(path)
    with pytest.raises(ConfigError) as caught:
        load_sink(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sink_of_another_model_is_refused(rank):
    sink = random_sink()
    share = HeadShare.of_rank(rank, 2, 4, 3)
    own = sink.witness[2 * rank : 2 * rank + 2]
    kv_format = KVFormat(3, 2, 6, 5, torch.float32)
    sink.check(kv_format, own + 0.02 * own.std() * torch.randn_like(own), share)
    with pytest.raises(ConfigError, match=r"values are \d+% off"):
        sink.check(kv_format, torch.randn_like(own), share)
    with pytest.raises(ConfigError, match="layers, heads"):
        sink.check(KVFormat(4, 2, 6, 5, torch.float32), own, share)


def test_witnesses_are_in_any_vocabulary():
    for vocabulary in (17, 300, 49_152, 262_144):
        assert all(0 <= token < vocabulary for token in witness_tokens(vocabulary))
