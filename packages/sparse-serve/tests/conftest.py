"""Puts the test doubles on the path: the repository imports its tests by file, which leaves folders off it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
