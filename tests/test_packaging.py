"""What installing a package brings."""

import importlib.metadata

from packaging.requirements import Requirement


def test_hashtrain_brings_what_cuda_needs_where_there_are_gpus():
    """hashcore alone stays small; whoever trains or decodes on Linux x86-64 can compile kernels."""
    stated = [Requirement(text) for text in importlib.metadata.requires("hashtrain") or []]
    (cuda,) = [one for one in stated if one.name == "hashcore" and one.extras == {"cuda"}]
    for system, machine, wanted in (
        ("linux", "x86_64", True),
        ("linux", "aarch64", False),
        ("darwin", "x86_64", False),
    ):
        assert cuda.marker is not None
        assert cuda.marker.evaluate({"sys_platform": system, "platform_machine": machine}) is wanted
    assert not [text for text in importlib.metadata.requires("hashcore") if "cuda-core" in text and "extra" not in text]
