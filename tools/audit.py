"""Audit the repository for secrets and unfinished work, and the licences of the packages that it installs.

    uv run --group audit tools/audit.py

1. Secrets in any tracked text (detect-secrets), without a baseline: findings are fixed, not listed.
2. Unfinished work: every such note must name the issue that tracks it, as #12.
3. Licences: that of each installed package is one of `PERMISSIVE`, or the package is listed with a reason.

Hosts of package indexes, local paths, file sizes, unpickling and the like are checked by tests (tests/test_wiring.py,
tests/test_safety.py). Prints every finding; exit code 1 if there are any.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from detect_secrets.core.secrets_collection import SecretsCollection
from detect_secrets.settings import transient_settings

ROOT = Path(__file__).resolve().parent.parent
DATA = re.compile(
    r"requirements\.txt|packages/sparse-serve/requirements-cpu\.txt|.*/demo/model/.*|.*\.(png|parquet|safetensors)"
)
"""Lists of hashes, a tokenizer's vocabulary, and binary files."""
_METHODS = "dense|down-proj|group-xnor|linear|lsh|magicpig|oracle|paper|planes|quest|recent|transform"
DIGESTS = "|".join(
    (
        rf"_identit|\"sha256\": \"|\"({_METHODS})[\w +-]*\": \"|\.cu[^\"]*\": \"",
        "(FROM_OTHERS|INTRINSICS) = ",
        "detect-secrets",
    )
)
"""Lines with digests of models or hashers in stored results, with a salt, or with the name of a tool."""
LISTED = re.compile(r'\s*"[0-9a-f]{12}",?')
"""A line of a list of digests, which is no secret in a stored result."""
PLUGINS = (
    *("ArtifactoryDetector", "AWSKeyDetector", "AzureStorageKeyDetector", "BasicAuthDetector", "CloudantDetector"),
    *("DiscordBotTokenDetector", "GitHubTokenDetector", "GitLabTokenDetector", "HexHighEntropyString"),
    *("JwtTokenDetector", "KeywordDetector", "NpmDetector", "OpenAIDetector", "PrivateKeyDetector"),
    *("PypiTokenDetector", "SlackDetector", "StripeDetector", "TelegramBotTokenDetector", "TwilioKeyDetector"),
)
NOTE = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b(?!.*#\d)")

PERMISSIVE = re.compile(
    r"(the )?mit( license)?|mit-cmu|isc( license \(iscl\)?)?|(3-clause )?bsd( license)?|0bsd|bsd-[23]-clause"
    r"|apache[- ]2\.0( license| with llvm-exception)?|apache software license|psf-2\.0"
    r"|python software foundation license|cnri-python|cc0-1\.0|zlib|bsl-1\.0|mpl-2\.0"
    r"|mozilla public license 2\.0 \(mpl 2\.0\)?|nvidia proprietary software|licenseref-nvidia-proprietary",
    re.IGNORECASE,
)
"""Licences of packages that may be used with ours: permissive ones; MPL 2.0, which covers only its own files; and
NVIDIA's, for the CUDA libraries that torch requires and that each user installs from NVIDIA."""
STAY = {
    "chardet": "LGPL; lm-eval requires it, only for the extra lm-eval; imported unchanged",
    "dominate": "LGPL; lm-eval requires it, only for the extra lm-eval; imported unchanged",
    "docutils": "public domain, BSD, and GPL for one Emacs file; builds the site, only for its authors",
    "fuzzywuzzy": "GPL 2; LongBench's scores of code in lm-eval import it: the extra lm-eval, which the user chooses",
    "kvpress": "Apache 2.0 in its LICENSE; its metadata names a file",
    "rouge": "Apache 2.0 in its LICENSE; its metadata names a file",
    "word2number": "MIT, in its full text",
    "cuda-toolkit": "an empty package of NVIDIA's that only requires others",
}


def texts() -> dict[str, str]:
    """Return every tracked text by its path."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [path for path in listed if path and not DATA.fullmatch(path) and (ROOT / path).is_file()]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}


def secrets(paths: list[str]) -> list[str]:
    """Return the places that look like a key, a token or a password."""
    filters = [
        {"path": "detect_secrets.filters.heuristic.is_sequential_string"},
        {"path": "detect_secrets.filters.heuristic.is_templated_secret"},
        {"path": "detect_secrets.filters.regex.should_exclude_line", "pattern": [DIGESTS]},
    ]
    plugins = [{"name": name, **({"limit": 3.0} if "Entropy" in name else {})} for name in PLUGINS]
    found = SecretsCollection(root=str(ROOT))
    with transient_settings({"plugins_used": plugins, "filters_used": filters}):
        for path in paths:
            found.scan_file(path)
    return [
        f"{path}:{secret.line_number} looks like a secret ({secret.type})"
        for path, secret in found
        if not (path.startswith("docs/results/") and LISTED.fullmatch(_line(path, secret.line_number)))
    ]


def _line(path: str, number: int) -> str:
    return (ROOT / path).read_text(encoding="utf-8").splitlines()[number - 1]


def notes(found: dict[str, str]) -> list[str]:
    """Return the notes about unfinished work that name no issue."""
    lines = [(path, number, line) for path, text in found.items() for number, line in enumerate(text.splitlines(), 1)]
    return [
        f"{path}:{number} leaves work without an issue: name its issue, #12"
        for path, number, line in lines
        if NOTE.search(line)
    ]


def licences(packages: list[dict[str, str]]) -> list[str]:
    """Return the packages without an accepted licence, given the list of pip-licenses."""
    return [
        f"{package['Name']} {package['Version']} is under {package['License'].splitlines()[0]!r}: expected a "
        "permissive licence; choose another package, or add it to STAY with the reason"
        for package in packages
        if package["Name"].lower() not in STAY
        and not all(PERMISSIVE.fullmatch(part.strip(" ()")) for part in re.split(r" AND | OR |; ", package["License"]))
    ]


def installed() -> list[dict[str, str]]:
    """List the installed third-party packages."""
    ours = [path.name for path in (ROOT / "packages").iterdir()]
    command = [sys.executable, "-m", "piplicenses", "--format=json", "--ignore-packages", *ours]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    """Print every finding; return 1 if there are any."""
    found = texts()
    packages = installed()
    finds = [*secrets(list(found)), *notes(found), *licences(packages)]
    for find in finds:
        print(find, file=sys.stderr)
    print(f"{len(found)} texts, {len(packages)} packages: {len(finds)} findings")
    return int(bool(finds))


if __name__ == "__main__":
    sys.exit(main())
