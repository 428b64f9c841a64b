"""Shared parts of the serving checks: prompts, jobs in separate processes, and the comparison of answers."""
