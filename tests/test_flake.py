"""The flake evaluates, against nix/stub in place of nixpkgs, and the shell text in it runs."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOOKS = "builtins.mapAttrs (_: s: s.default.shellHook)"
COMMANDS = "builtins.mapAttrs (_: builtins.mapAttrs (_: command: command.text))"
SYSTEMS = ("aarch64-darwin", "aarch64-linux", "x86_64-linux")


@pytest.fixture(scope="module")
def nix(tmp_path_factory):
    """Run `nix ... FLAKE#ATTRIBUTE` offline, in a store of its own."""
    if shutil.which("nix") is None:
        pytest.skip("nix is not on PATH; on Debian it is the package nix-bin")
    folder = tmp_path_factory.mktemp("flake")
    # A copy: nix would copy the whole checkout, its virtual environment too, into the store.
    shutil.copytree(ROOT / "nix", folder / "flake" / "nix")
    for name in ("flake.nix", "flake.lock"):
        shutil.copy(ROOT / name, folder / "flake")

    def run(*arguments, attribute=""):
        command = ["nix", "--extra-experimental-features", "nix-command flakes", "--offline"]
        command += ["--store", f"{folder}/store", *arguments, f"path:{folder}/flake{attribute}"]
        command += ["--no-write-lock-file", "--override-input", "nixpkgs", f"path:{folder}/flake/nix/stub"]
        done = subprocess.run(command, env=os.environ | {"HOME": str(folder)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def scripts(nix):
    """The shell text of the flake: {("hook" or a command, system): text}."""
    hooks = json.loads(nix("eval", "--json", "--apply", HOOKS, attribute="#devShells"))
    commands = json.loads(nix("eval", "--json", "--apply", COMMANDS, attribute="#packages"))
    found = {("hook", system): text for system, text in hooks.items()}
    return found | {(name, system): text for system, texts in commands.items() for name, text in texts.items()}


def test_every_output_evaluates(nix):
    nix("flake", "check", "--no-build")
    for output in ("checks", "devShells", "formatter", "packages"):
        listed = nix("eval", "--json", "--apply", "builtins.attrNames", attribute=f"#{output}")
        assert json.loads(listed) == list(SYSTEMS)


def test_shell_text_parses(scripts):
    names = {"hook", "default", "evals", "hashtrain", "sparse-decode"}
    assert scripts.keys() == {(name, system) for name in names for system in SYSTEMS}
    for where, text in scripts.items():
        # As nixpkgs wraps it; SC1091: the virtual environment it sources is made by the line itself.
        script = f"#!/usr/bin/env bash\nset -euo pipefail\n{text}"
        parsers = [["bash", "-n"]]
        if shutil.which("shellcheck"):
            parsers.append(["shellcheck", "--exclude=SC1091", "-"])
        for parser in parsers:
            done = subprocess.run(parser, input=script, capture_output=True, text=True)
            assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"
