"""The state machine of caches for a moment; `fuzz_cache.py` runs it for as long as one likes."""

import pytest
from fuzz_cache import ALL_KINDS, run, run_round
from sparse_decode.caches.cache import Coded


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of a fork beside threads, which is meant
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_attached_layers_are_plain_ones_with_fresh_codes(kind):
    assert sum(run_round(seed, kind) for seed in range(8)) == 320


def test_a_run_counts_its_steps():
    assert run(0, 1) == 40


def test_the_machine_finds_a_layer_that_does_not_look_at_what_others_do(monkeypatch):
    monkeypatch.setattr(Coded, "settle", lambda layer: None)
    with pytest.raises(AssertionError):
        _ = [run_round(seed, "dynamic") for seed in range(40)]
