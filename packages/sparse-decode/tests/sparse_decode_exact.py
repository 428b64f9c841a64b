"""What the tests of exact mode share."""

from sparse_decode import Budget, attach
from sparse_decode_doubles import SignHasher, prompts

POOR = Budget(0.03, sink=1, recent=1)
"""So few tokens that drafts are often wrong."""


class Steady:
    """A pace that always drafts as many tokens."""

    def __init__(self, drafted):
        self.drafted = drafted

    def next(self, n):
        return self.drafted

    def could(self, n):
        return True

    def learn(self, drafted, accepted):
        pass


def attached(model, drafted=4, selector=None, budget=POOR, **options):
    attachment = attach(model, selector or SignHasher(), budget, exact=drafted, **options)
    attachment.drafts.pace = lambda: Steady(drafted)
    return attachment


def prompt(length=40, seed=1):
    return prompts((length,), seed)[0]
