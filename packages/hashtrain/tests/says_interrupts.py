"""Imported in the process that workers are forked from by test_workers.py: says what Ctrl-C would do to it."""

import signal

print("server ignores", signal.getsignal(signal.SIGINT) is signal.SIG_IGN, flush=True)
