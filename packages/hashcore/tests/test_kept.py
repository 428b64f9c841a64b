"""Per-thread caches on CUDA: bounded, and separate for each device and folder of kernels."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="scratch memory is torch's")
kept = pytest.importorskip("hashcore.cuda.kept", reason="scratch memory is torch's")

from hashcore.cuda import kernels, launch  # noqa: E402

HERE = torch.device("cpu")


def elsewhere(call):
    """What a call returns in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_the_oldest_goes_first():
    table = kept.Table(3)
    for form in (1, 2, 3, 1, 4):
        table.keep(form, str(form))
    assert table.found == {3: "3", 1: "1", 4: "4"}
    assert elsewhere(lambda: (table.most, table.found)) == (3, {})


def test_what_is_kept_for_one_token_fewer_is_rewritten_if_it_can_be():
    table, asked = kept.Table(3), []

    def renew(n, kind="kind", able=True):
        return table.renew((kind, n), kind, n, lambda made: asked.append((made, n)) or able, lambda: f"made {kind} {n}")

    assert [renew(5), renew(6), renew(7)] == ["made kind 5"] * 3
    assert table.found == {("kind", 7): "made kind 5"}
    assert asked == [("made kind 5", 6), ("made kind 5", 7)]
    assert renew(8, able=False) == "made kind 8"
    assert renew(9, "other") == "made other 9"
    assert [renew(6), renew(11)] == ["made kind 6", "made kind 11"]
    assert table.found == {("other", 9): "made other 9", ("kind", 6): "made kind 6", ("kind", 11): "made kind 11"}
    assert renew(9) == "made kind 9", "the oldest is gone, and so is what is known of it"


def test_scratch_memory_is_one_for_what_runs_in_order(monkeypatch):
    monkeypatch.setattr(kept, "_lanes", kept.Table(2))
    lanes = iter([(0, 7), (0, 7), (0, 8), (0, 7), (1, 7, 33), (0, 7)])
    monkeypatch.setattr(launch, "lane", lambda device: next(lanes))
    first, again, stream, more, capture, evicted = (kept.scratch(words, HERE) for words in (90, 40, 90, 91, 9, 9))
    assert again is first
    assert stream is not first
    assert more.words == more.tensor.numel() == 180, "twice as much, so that growing rows do not ask each time"
    assert capture.words == 9
    assert evicted is more
    assert {x.address == x.tensor.data_ptr() for x in (first, stream, more, capture)} == {True}


@pytest.fixture
def loaded(monkeypatch):
    """The kernels that are loaded, by a driver that launches nothing."""
    found = []
    driver = SimpleNamespace(CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuLaunchKernel=lambda *_: (0,))
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setattr(launch, "_current_stream", lambda index: 0)
    monkeypatch.setattr(launch, "_bind", lambda index: None)
    monkeypatch.setattr(launch, "_function", lambda index, folder, *_: found.append((index, folder.name)))
    return found


def test_launches_are_prepared_once_a_device_and_folder(loaded, monkeypatch):
    device = SimpleNamespace(here=0)
    monkeypatch.setattr(launch, "_current_device", lambda: device.here)
    launches = kernels.Kept([kernels.pack("f32", 1, 2, 3)])
    ours, others = Path("ours"), Path("others")
    for device.here, folder in ((0, ours), (0, ours), (1, ours), (0, ours), (0, others), (0, others), (1, others)):
        launch.run(launches, torch.device("cuda"), folder)
    assert loaded == [(0, "ours"), (1, "ours"), (0, "others"), (1, "others")]
