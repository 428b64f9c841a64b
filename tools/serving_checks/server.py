"""The server of sparse-serve's README, as a separate process on this machine."""

import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
README = ROOT / "packages" / "sparse-serve" / "README.md"
PORT = 8000  # vLLM's default
PATIENCE = 900.0  # seconds for it to start


def as_written(log: pathlib.Path) -> str:
    """Start the server of the README and ask it, both as the README says; return its answer.

    Raises: SystemExit if a command is missing, or the answer is no completion.
    """
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), re.S)
    start = next((block for block in blocks if "vllm.entrypoints.openai.api_server" in block), None)
    request = next((block for block in blocks if block.startswith("curl ")), None)
    if start is None or request is None:
        raise SystemExit("the README must show a line that starts the server, and a request with curl")
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    kept |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if _answers():
        raise SystemExit(f"port {PORT}, which the README names, is taken; end what uses it")
    command = ["bash", "-c", start.strip()]
    with log.open("w") as said:
        server = subprocess.Popen(command, cwd=ROOT, env=kept, stdout=said, stderr=said, start_new_session=True)
    try:
        end = time.monotonic() + PATIENCE
        while not _answers():
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"check_serving: the server did not start: {log.read_text()[-3000:]}")
            time.sleep(0.5)
        asked = subprocess.run(["bash", "-c", request], cwd=ROOT, capture_output=True, text=True, timeout=300)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
    try:
        return json.loads(asked.stdout)["choices"][0]["text"]
    except (ValueError, LookupError, TypeError):
        raise SystemExit(f"the server answered no completion: {asked.stdout[:300]}") from None


def _answers() -> bool:
    link = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
    try:
        link.request("GET", "/health")
        return link.getresponse().status == 200
    except OSError:
        return False
    finally:
        link.close()
