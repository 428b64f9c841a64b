"""The plug-in's settings and their errors."""

import subprocess
import sys

import pytest
from sparse_decode.budget import LayerBudget
from sparse_serve import Settings

REFUSED = {
    "a word": ({"spotlight": "yes"}, "must be a mapping with a hasher, got str"),
    "no hasher": ({"spotlight": {"fraction": 0.1}}, "needs a hasher, the folder of a stored hasher, got none"),
    "an empty hasher": ({"spotlight": {"hasher": ""}}, "hasher must be the folder of a stored hasher, got ''"),
    "a stranger": ({"spotlight": {"hasher": "x", "topk": 3}}, "takes hasher, fraction, .*, got topk; remove"),
    "too much": ({"spotlight": {"hasher": "x", "fraction": 2}}, "fraction must be above 0 and at most 1, got 2"),
    "measured": (
        {"spotlight": {"hasher": "x", "dense_below": "measured"}},
        "dense_below must be an integer of 0",
    ),
    "one layer": ({"spotlight": {"hasher": "x", "dense_layers": 2}}, "must be a list of indices of layers, got 2"),
    "layer -1": ({"spotlight": {"hasher": "x", "dense_layers": [-1]}}, "must be a list of indices of layers, got"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_setting_is_refused(name):
    additional, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        Settings.of(additional)


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, {"spotlight": None}])
def test_without_settings_there_is_nothing_to_do(additional):
    assert Settings.of(additional) is None


def test_defaults_are_those_of_the_budget():
    assert Settings("x").budget() == LayerBudget()


def test_every_setting_arrives():
    given = dict(fraction=0.1, min_tokens=3, max_tokens=50, sink=2, recent=5, dense_below=100)
    settings = Settings.of({"spotlight": {"hasher": "x", "dense_layers": [0, 2], **given}})
    assert settings == Settings("x", **given, dense_layers=(0, 2))
    assert settings is not None
    assert settings.budget() == LayerBudget(**given)


def test_what_the_engine_imports_first_brings_no_numba():
    """Its own compiler must look at the machine first."""
    code = "import sys, sparse_serve.plugin, sparse_serve.refusals, sparse_serve.batch, sparse_serve.served"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('numba' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr
