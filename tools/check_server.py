"""Check the OpenAI-compatible server with our plug-in, on the CPU, with the Python of an environment that has both.

    PYTHON tools/check_server.py --seconds 60 --hasher path/or/hasher/of/the/demo/model
    PYTHON tools/check_server.py --parts start   # the server and the request of sparse-serve's README, as written

clients: 8 clients send requests over loopback all the time, with prompts of 1 to 1,000 tokens; one request in five is
abandoned during its answer. Halfway through, one of the engine's processes is killed: the server must exit by itself
and leave no process behind, and a new one is started. Failures: an answer that differs from that of `attach` (except at
near-ties), a request that fails while the server is up, cache blocks or requests left at the end, or metrics that do
not match.

start: needs `runs/demo`, the hashers of the demo model, and port 8000; the server must return text. --out stores what
was found, as in check_serving.py.
"""

import argparse
import http.client
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
from typing import Any

from serving_checks.jobs import ask, differences, requests
from serving_checks.models import hash_of
from serving_checks.record import Record
from serving_checks.server import ROOT, Server, as_written, children, of_model

CLIENTS, NEW, LONG, FRACTION = 8, 24, 600, 0.25
GONE = 60.0  # seconds for the remaining processes of a server to exit


class Clients:
    """Clients that send requests to a server until `stop`."""

    def __init__(self, server: Server, prompts: list[list[int]], expected: dict[str, Any], seed: int) -> None:
        self.answered: list[int] = []
        self.left = self.ties = 0
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self._server, self._prompts, self._expected = server, prompts, expected
        self._stop, self._lock = threading.Event(), threading.Lock()
        draws = [random.Random(seed * CLIENTS + i) for i in range(CLIENTS)]
        self._threads = [threading.Thread(target=self._ask, args=(draw,)) for draw in draws]
        for thread in self._threads:
            thread.start()

    def _ask(self, draw: random.Random) -> None:
        while not self._stop.is_set():
            index, leaves = draw.randrange(len(self._prompts)), draw.random() < 0.2
            try:
                how = (LONG, draw.randint(1, 12)) if leaves else (NEW, None)
                tokens = self._server.complete(self._prompts[index], *how)
            except (OSError, http.client.HTTPException) as error:
                with self._lock:
                    self.failed.append(f"{type(error).__name__}: {error}")
                return
            with self._lock:
                self._check(index, tokens)

    def _check(self, index: int, tokens: list[int] | None) -> None:
        if tokens is None:
            self.left += 1
            return
        self.answered.append(index)
        own = {name: [self._expected[name][index]] for name in ("tokens", "logits")}
        ties, wrong = differences([tokens], own) if len(tokens) == NEW else (0, [f"got {len(tokens)} tokens"])
        self.ties += ties
        self.wrong += [f"prompt {index}: {line}" for line in wrong]

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def killed(server: Server, clients: Clients) -> list[str]:
    """Kill one of the engine's processes; return what is wrong with how the server exits."""
    known = children(server.process.pid)
    early = list(clients.failed)
    print("killed:", server.kill_worker(random.Random(0))[:100], flush=True)
    code = server.ended(GONE)
    clients.stop()
    end = time.monotonic() + GONE
    while time.monotonic() < end and any(pathlib.Path(f"/proc/{pid}").exists() for pid in known):
        time.sleep(0.2)
    alive = [line[:100] for pid, line in known.items() if pathlib.Path(f"/proc/{pid}").exists()]
    print(f"the server ended with {code}; of its {len(known)} processes {len(alive)} are left", flush=True)
    wrong = [f"failed before anything was killed: {line}" for line in early]
    wrong += ["the server did not end by itself"] if code is None else []
    return wrong + [f"still there: {line}" for line in alive]


def settled(server: Server, clients: Clients, prompts: list[list[int]], hasher: str) -> list[str]:
    """Compare the server's own metrics with the answers."""
    from sparse_serve import Settings
    from sparse_serve.spent import Spent

    server.complete(prompts[0], NEW)  # a step after the last abandoned request
    asked = Settings(hasher, FRACTION).budget()
    spent = [Spent.of(asked, len(prompts[i]), NEW) for i in (*clients.answered, 0)]
    wrong = []
    for name, expected in (
        ("vllm:kv_cache_usage_perc", 0),
        ("vllm:num_requests_running", 0),
        ("vllm:num_requests_waiting", 0),
        ("spotlight:request_density_count", len(spent)),
        ("spotlight:tokens_read_total", sum(x.read for x in spent)),
        ("spotlight:tokens_seen_total", sum(x.seen for x in spent)),
    ):
        found = server.metric(name)
        print(f"{name} {found:g}, expected {expected}", flush=True)
        wrong += [] if found == expected else [f"{name} is {found:g}, expected {expected}"]
    return wrong + [f"failed while the server was up: {line}" for line in clients.failed]


def checked(
    server: Server, prompts: list[list[int]], expected: dict[str, Any], hasher: str, seconds: float, record: Record
) -> list[str]:
    """Let clients use a server for a while, then kill one of its processes, or stop it; return what was wrong."""
    last = bool(record.rows)  # the second server
    server.wait()
    clients = Clients(server, prompts, expected, seed=int(last))
    time.sleep(seconds)
    if last:
        clients.stop()
        wrong = settled(server, clients, prompts, hasher)
        code = server.stop()
        wrong += [] if code == 0 else [f"the server ended with {code}"]
    else:
        wrong = killed(server, clients)
    equal = len(clients.answered) - clients.ties - len(clients.wrong)
    row = {"answers": len(clients.answered), "equal": equal, "ties": clients.ties, "abandoned": clients.left}
    record.add(what="stopped" if last else "a process killed", **row, clients=CLIENTS, lasted=seconds)
    print(f"{row}; {len(clients.wrong)} wrong, {len(clients.failed)} failed", flush=True)
    return wrong + clients.wrong + ([] if clients.answered and clients.left else ["too few requests to tell"])


def use(given: argparse.Namespace, record: Record) -> list[str]:
    """Let clients use one server until it is killed, and a second one until it is stopped."""
    from hashtrain.demo import demo_model_path

    model, wrong, prompts = str(demo_model_path()), list[str](), requests(4000)
    with tempfile.TemporaryDirectory() as folder:
        hasher, _ = hash_of(model, f"{folder}/hasher", given.hasher)
        asked = {"hasher": hasher, "fraction": FRACTION, "dense_below": 0}
        expected = ask("attached", model=model, prompts=prompts, new=NEW, spotlight=asked)
        for half in range(2):
            server = of_model(model, asked, pathlib.Path(folder) / f"log{half}")
            try:
                wrong += checked(server, prompts, expected, hasher, given.seconds / 2, record)
            finally:
                server.stop()
            if wrong:
                print(server.log.read_text()[-3000:])
    return wrong


def start(record: Record) -> list[str]:
    """Start the server of the README, and ask it."""
    if not (ROOT / "runs" / "demo" / "transform").is_dir():
        return ["the README's server needs runs/demo/transform; run `uv run hashtrain` first"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            text = as_written(pathlib.Path(folder) / "log")
    except (ValueError, SystemExit) as error:
        record.add(what="as written", answers=0)
        return [str(error)]
    print(f"the README's server answered {text!r}", flush=True)
    record.add(what="as written", answers=1)
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--hasher", help="a hasher of the demo model; default: an untrained one")
    parser.add_argument("--parts", nargs="+", choices=("clients", "start"), default=["clients", "start"])
    parser.add_argument("--out", type=pathlib.Path, help="file for what was found; its other parts are kept")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server does not outlive this process
    record = Record(given.hasher)
    checks = {"clients": lambda: use(given, record), "start": lambda: start(record)}
    record.run({name: checks[name] for name in given.parts}, given.out)
    print("\n".join(record.wrong) or "all well", flush=True)
    return bool(record.wrong)


if __name__ == "__main__":
    sys.exit(main())
