"""Puts the test doubles on the path: the repository imports its tests by file, which leaves folders off it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "hashcore" / "tests"))  # for hostsim
sys.path.append(str(Path(__file__).parents[3] / "tests"))  # for fuzzing and check_families


@pytest.fixture(autouse=True)
def _one_thread_and_no_gradient():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)
