"""Where a growing buffer keeps its rows: on which device, in whose memory, and with how much room for the next."""

import pytest
import torch
from sparse_decode.caches.buffer import GrowingBuffer
from torch._subclasses.fake_tensor import FakeTensorMode


def rows(count, device="cpu"):
    return torch.arange(float(2 * count), device=device).view(1, 1, count, 2)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("act", ["append", "adopt"])
def test_rows_are_on_their_device_or_the_host(host, device, act):
    with FakeTensorMode():  # tensors of a GPU that is not there
        buffer = GrowingBuffer(host)
        buffer.append(rows(9))  # an adopted row replaces them, an appended one follows
        buffer = buffer if act == "adopt" else GrowingBuffer(host)
        getattr(buffer, act)(rows(3, device))
        assert buffer.view().device.type == ("cpu" if host else device)
        assert buffer.length == buffer.view().shape[2] == 3


def test_a_buffer_is_on_the_device_unless_asked_for_the_host():
    with FakeTensorMode():
        buffer = GrowingBuffer()
        buffer.append(rows(3, "cuda"))
        assert buffer.view().device.type == "cuda"


@pytest.mark.parametrize(
    ("host", "device", "pinned"), [(True, "cuda", True), (True, "cpu", False), (False, "cuda", False)]
)
def test_only_host_rows_of_a_gpu_are_pinned(host, device, pinned, monkeypatch):
    asked, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: (asked.append(options), empty(*sizes, **options))[1])
    with FakeTensorMode():
        GrowingBuffer(host).append(rows(3, device))
    assert [options["pin_memory"] for options in asked] == [pinned]


@pytest.mark.parametrize("host", [False, True])
def test_adopted_rows_are_not_copied(host):
    theirs, buffer = rows(3), GrowingBuffer(host)
    buffer.adopt(theirs)
    assert buffer.view().data_ptr() == theirs.data_ptr()


@pytest.mark.parametrize(("held", "spare"), [(1, 64), (511, 64), (520, 65), (1000, 125)])
def test_there_is_room_for_64_rows_or_an_eighth_more(held, spare):
    buffer = GrowingBuffer()
    buffer.append(rows(held))
    place = buffer.view().data_ptr()
    buffer.append(rows(spare))
    assert buffer.view().data_ptr() == place
    before = buffer.view()
    buffer.append(rows(1))
    assert buffer.view().data_ptr() != place
    assert torch.equal(buffer.view()[:, :, :-1], before)


def test_a_buffer_without_rows_says_so():
    with pytest.raises(ValueError, match="empty"):
        GrowingBuffer().view()
    assert GrowingBuffer().nbytes == 0


def test_rows_of_others_are_never_written_to():
    theirs = torch.arange(12.0).view(1, 1, 6, 2)
    buffer, before = GrowingBuffer(), theirs.clone()
    buffer.adopt(theirs)
    buffer.truncate(4)
    buffer.append(torch.full((1, 1, 2, 2), -1.0))
    assert torch.equal(theirs, before)
    assert torch.equal(buffer.view()[0, 0, :, 0], torch.tensor([0.0, 2.0, 4.0, 6.0, -1.0, -1.0]))
    held = buffer.view()
    buffer.append(torch.zeros(1, 1, 1, 2))  # its own room is used
    assert buffer.view().data_ptr() == held.data_ptr()
