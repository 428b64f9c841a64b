"""Where a growing buffer keeps its rows: on which device, with room for the next, in huge pages if there are some."""

import pytest
import torch
from sparse_decode.caches import buffer as buffers
from sparse_decode.caches.buffer import GrowingBuffer, in_huge_pages
from torch._subclasses.fake_tensor import FakeTensorMode

MIB = 1 << 20


def rows(count, device="cpu"):
    return torch.arange(float(2 * count), device=device).view(1, 1, count, 2)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("act", ["append", "adopt"])
def test_rows_are_on_their_device_or_the_host_and_pinned_only_there(host, device, act, monkeypatch):
    asked, empty = [], torch.empty
    with FakeTensorMode():  # tensors of a GPU that is not there
        buffer = GrowingBuffer(host)
        buffer.append(rows(9))  # an adopted row replaces them, an appended one follows
        buffer = buffer if act == "adopt" else GrowingBuffer(host)
        monkeypatch.setattr(torch, "empty", lambda *sizes, **how: (asked.append(how), empty(*sizes, **how))[1])
        getattr(buffer, act)(rows(3, device))
        assert buffer.view().device.type == ("cpu" if host else device)
        assert buffer.length == buffer.view().shape[2] == 3
    if act == "append":
        assert [how["pin_memory"] for how in asked] == [host and device == "cuda"]


@pytest.mark.parametrize(("held", "spare"), [(1, 64), (511, 64), (520, 65), (1000, 125)])
def test_there_is_room_for_64_rows_or_an_eighth_more(held, spare):
    buffer = GrowingBuffer()
    with pytest.raises(ValueError, match="empty"):
        buffer.view()
    buffer.append(rows(held))
    place = buffer.view().data_ptr()
    buffer.append(rows(spare))
    assert buffer.view().data_ptr() == place
    before = buffer.view()
    buffer.append(rows(1))
    assert buffer.view().data_ptr() != place
    assert torch.equal(buffer.view()[:, :, :-1], before)


@pytest.mark.parametrize("host", [False, True])
def test_rows_of_others_are_adopted_without_a_copy_and_never_written_to(host):
    theirs = torch.arange(12.0).view(1, 1, 6, 2)
    buffer, before = GrowingBuffer(host), theirs.clone()
    buffer.adopt(theirs)
    assert buffer.view().data_ptr() == theirs.data_ptr()
    buffer.truncate(4)
    buffer.append(torch.full((1, 1, 2, 2), -1.0))
    assert torch.equal(theirs, before)
    assert torch.equal(buffer.view()[0, 0, :, 0], torch.tensor([0.0, 2.0, 4.0, 6.0, -1.0, -1.0]))
    held = buffer.view()
    buffer.append(torch.zeros(1, 1, 1, 2))  # its own room is used
    assert buffer.view().data_ptr() == held.data_ptr()


def test_only_whole_huge_pages_of_long_rows_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(buffers, "_advise", lambda: lambda *given: asked.append(given))
    for size in (2 * MIB, 3 * MIB, 9 * MIB + 123):
        x = torch.empty(size, dtype=torch.uint8)
        assert in_huge_pages(x) is x
        start, length, _ = asked.pop()
        assert start % (2 * MIB) == length % (2 * MIB) == 0
        assert x.data_ptr() <= start
        assert start + length <= x.data_ptr() + size
        assert size - length < 4 * MIB
    in_huge_pages(torch.zeros(9 * MIB, dtype=torch.uint8), written=True)  # memory that was written is moved
    assert [given[2] for given in asked] == [14, 25]
    asked.clear()
    in_huge_pages(torch.empty(2 * MIB - 1, dtype=torch.uint8))
    in_huge_pages(torch.empty(9 * MIB, dtype=torch.uint8, device="meta"))
    with FakeTensorMode():
        in_huge_pages(torch.empty(9 * MIB, dtype=torch.uint8))
    buffer = GrowingBuffer()
    buffer.append(torch.zeros(1, 2, 40, 64))
    assert not asked
    buffer.append(torch.zeros(1, 2, 40_000, 64))
    assert len(asked) == 1
