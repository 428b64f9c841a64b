"""How the stages of a GPU day measure: a line of results.jsonl for each number, as soon as it is known.

On the CPU the same code runs without graphs, as a rehearsal: its times mean nothing.
"""

import contextlib
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], object]


class Stage:
    """What a stage is told: its device, its folder, and how long it may take.

    Args: device: "cuda" or "cpu"; folder: where results.jsonl is; seconds: for the whole stage.
    """

    def __init__(self, device: str, folder: Path, seconds: float):
        self.device, self.cuda, self.folder = device, device == "cuda", folder
        self.end = time.perf_counter() + seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.perf_counter()

    def put(self, kind: str, **row: Any) -> None:
        """Write and print a row."""
        line = json.dumps({"kind": kind, **row}, default=str)
        with (self.folder / "results.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    @contextlib.contextmanager
    def part(self, name: str, **more: Any) -> Iterator[None]:
        """Run a part: its error becomes a row, and the stage goes on unless the device is lost."""
        try:
            yield
        except Exception as error:
            self.put("error", part=name, error=f"{type(error).__name__}: {error}"[:600], **more)
            traceback.print_exc()
            self.wait()  # raises if the context is lost: nothing more can be measured here
        finally:
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def graph_us(self, steps: Sequence[Step], replays: int = 15) -> float:
        """Return the median microseconds of a step in a CUDA graph of all steps; each is run once before."""
        for step in steps:
            step()
        self.wait()
        if not self.cuda:
            return self.eager_us(steps[:1], rounds=1)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step()
        taken = []
        for _ in range(replays + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(1000 * begin.elapsed_time(end) / len(steps))
        return statistics.median(taken[3:])

    def eager_us(self, steps: Sequence[Step], rounds: int = 3) -> tuple[float, float]:
        """Return the microseconds of a step without a graph: until it is done, and until the host has queued it."""
        best = []
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            for step in steps:
                step()
            queued = time.perf_counter()
            self.wait()
            best.append((time.perf_counter() - begun, queued - begun))
        done, queued = min(best[1:])
        return done * 1e6 / len(steps), queued * 1e6 / len(steps)
