"""Published lists of tensors become hashers; any other content is rejected with one sentence."""

import contextlib
import os
import zipfile

import pytest
import torch
from hashtrain import Hasher
from hashtrain.convert import convert
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu


def published(layers=2, heads=4, d=32):
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, d, d), (1, heads, 1, d), (1, heads, d, d), (1, heads, 1, d)]
    return [torch.randn(size, generator=generator).bfloat16() for _ in range(layers) for size in sizes]


def stored(folder, content):
    torch.save(content, folder / "published.pth")
    return folder / "published.pth"


def test_a_converted_hasher_computes_the_published_function(tmp_path, tiny_config):
    tensors = published()
    convert(stored(tmp_path, tensors), tiny_config(), tmp_path / "h", "tiny")
    hasher = Hasher.from_pretrained(tmp_path / "h")
    p0, b0, p1, b1 = (t.float() for t in tensors[4:])
    x = torch.randn(2, 4, 9, 32, generator=torch.Generator().manual_seed(1))
    h = silu(x @ p0 + b0) + x
    torch.testing.assert_close(hasher.layer(1).values(x), h @ p1 + b1 + h, atol=1e-3, rtol=1e-4)
    assert hasher.config.base_model == "tiny"
    assert "published.pth" in (tmp_path / "h" / "README.md").read_text()


class Surprise:
    def __reduce__(self):
        return os.system, ("touch surprise",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (published()[:4], "4 tensors, 1 layers; expected 8, 2 layers; the published file is truncated"),
        (published(3), "12 tensors, 3 layers; expected 8"),
        (published(heads=8), r"tensor 0 of layer 0: expected floats of \(1, 4, 32, 32\), got torch.bfloat16 \(1, 8,"),
        ([*published()[:7], "text"], "tensor 3 of layer 1: expected floats of .*, got str"),
        ([*published()[:7], torch.zeros(1, 4, 1, 32, dtype=torch.int32)], "expected floats of"),
        ([*published()[:7], torch.full((1, 4, 1, 32), torch.nan)], "tensor 3 of layer 1 is not finite"),
        ({"a": torch.zeros(1)}, "must hold a list of tensors, got dict"),
        ([Surprise()], "damaged or holds more than tensors"),
        ([torch.zeros(1 << 22)], "expected at most"),
    ],
)
def test_other_content_is_one_sentence_and_nothing_is_written(tmp_path, tiny_config, content, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        convert(stored(tmp_path, content), tiny_config(), tmp_path / "h")
    assert [file.name for file in tmp_path.iterdir()] == ["published.pth"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = stored(tmp_path_factory.mktemp("whole"), published())
    return path


@given(share=st.floats(0, 0.9999), flip=st.integers(0, 255))
@settings(deadline=None, max_examples=40)
def test_every_truncation_and_every_changed_byte_is_one_sentence_or_harmless(whole, tiny_config, share, flip):
    path, content = whole, whole.read_bytes()
    at = int(len(content) * share)
    broken = path.with_name("broken.pth")
    broken.write_bytes(content[:at] + (bytes([content[at] ^ flip]) + content[at + 1 :] if flip else b""))
    with contextlib.suppress(ValueError):
        convert(broken, tiny_config(), path.parent / "h")
        assert flip, "a truncated file was taken"


def test_a_small_file_that_holds_a_large_one_is_refused(whole, tiny_config):
    path = whole.with_name("bomb.pth")
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_DEFLATED) as new:
        new.writestr("archive/data.pkl", bytes(9 << 20))
    with pytest.raises(ValueError, match="expected at most"):
        convert(path, tiny_config(), path.parent / "h-bomb")
