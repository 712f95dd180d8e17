"""Copies beside an NPU's other work. There is no NPU here, so a stand-in for ``torch.npu`` records the calls."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kvmosaic.core.accelerator import accelerator_in_use, accelerator_of, free_unused_memory
from kvmosaic.store.streams import on_side_stream, record_event

DEVICE = SimpleNamespace(type="npu", index=3)


class NPU:
    """The names of ``torch_npu.npu`` that are used, as its release 2.10 has them."""

    def __init__(self):
        self.asked = []
        npu = self

        class Event:
            device = DEVICE

            def record(self):
                npu.asked.append("record")

        class Stream:
            def wait_event(self, event):
                npu.asked.append("wait")

            def synchronize(self):
                npu.asked.append("synchronize")

        self.Event, self.Stream = Event, Stream

    def is_initialized(self):
        return True

    def empty_cache(self):
        self.asked.append("empty")

    @contextmanager
    def device(self, device):
        self.asked.append(f"on {device.index}")
        yield

    @contextmanager
    def stream(self, stream):
        self.asked.append("beside")
        yield
        self.asked.append("back")


@pytest.fixture
def npu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which is used instead")
    made = NPU()
    monkeypatch.setattr(torch, "npu", made, raising=False)
    return made


def test_without_an_accelerator_nothing_is_waited_for():
    if not torch.cuda.is_available():
        assert accelerator_in_use() is None
        assert record_event() is None
    assert accelerator_of(torch.device("cpu")) is None
    with on_side_stream(None):
        free_unused_memory()


def test_a_copy_waits_for_earlier_work_and_is_over_at_the_end(npu):
    event = record_event()
    with on_side_stream(event):
        npu.asked.append("copy")
    assert npu.asked == ["record", "on 3", "beside", "wait", "copy", "synchronize", "back"]


def test_unused_memory_is_given_back(npu):
    free_unused_memory()
    assert npu.asked == ["empty"]
