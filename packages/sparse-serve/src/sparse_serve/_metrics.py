"""Prometheus metrics of density, on vLLM's own `/metrics` endpoint.

vLLM creates a `RequestMetrics` in its API server process, through an entry point of the group
`vllm.stat_logger_plugins`, and passes it every finished request. The sparse layers run in another process and cannot
use this registry; but the tokens that a request reads follow from its lengths, so nothing has to be sent.
Names start with `spotlight:`, because vLLM removes all metrics that start with `vllm:` before it registers its own.
"""

# vLLM is no dependency of this package, and has few types.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportGeneralTypeIssues=false

import functools
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram
from vllm.v1.metrics.loggers import StatLoggerBase

from sparse_serve.settings import Settings
from sparse_serve.spent import spent

LABELS = ("model_name", "engine")
SHARES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)


class Metrics(NamedTuple):
    """The metrics of this process."""

    density: Histogram
    read: Counter
    seen: Counter


@functools.cache
def metrics() -> Metrics:
    """Create the metrics, once per process: a registry rejects duplicate names."""
    return Metrics(
        Histogram(
            "spotlight:request_density",
            "Tokens read / visible tokens in the decode steps of a finished request, per sparse layer.",
            LABELS,
            buckets=SHARES,
        ),
        Counter("spotlight:tokens_read", "Tokens read by decode steps of finished requests, per sparse layer.", LABELS),
        Counter("spotlight:tokens_seen", "Visible tokens of decode steps of finished requests, per layer.", LABELS),
    )


class RequestMetrics(StatLoggerBase):
    """Records each finished request; does nothing in an engine without sparse attention."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        settings = Settings.of(vllm_config.additional_config)
        self._budget = None if settings is None else settings.budget()
        self._labels = (vllm_config.model_config.served_model_name, str(engine_index))

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        if self._budget is None or iteration_stats is None:
            return
        found = metrics()
        for request in iteration_stats.finished_requests:
            read, seen = spent(self._budget, request.num_prompt_tokens, request.num_generation_tokens)
            if seen:
                found.density.labels(*self._labels).observe(read / seen)
                found.read.labels(*self._labels).inc(read)
                found.seen.labels(*self._labels).inc(seen)

    def log_engine_initialized(self) -> None:
        """Log nothing; the engine logs its start."""
