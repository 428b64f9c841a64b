"""Helper for tests of whole commands: the JSON of the last line."""

import json


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])
