"""A run's chains as OpenTelemetry spans: `export_spans`.

Models: one span a rollout and one a training batch, which links to the rollouts that it was made of (a batch has many
parents, so it is no child of one); the chain's ids are attributes of both. Leaves out where spans go: the provider's
exporters decide. Needs the package opentelemetry-sdk, and only this file does.

    provider = TracerProvider(); provider.add_span_processor(SimpleSpanProcessor(exporter))
    export_spans(run, provider)
"""

from __future__ import annotations

from typing import Any

from rlinfra_utils.doors import installed
from rlinfra_utils.tracing.chain import Chain, chains_of
from rlinfra_utils.tracing.measure import per_rollout
from rlinfra_utils.tracing.reading import RunData

_BATCH = ("training_batch_id", "optimizer_step", "trained_policy_version", "resulting_policy_version")
_BATCH += ("branch_id", "config_hash", "rolled_back")


def export_spans(run: RunData, provider: Any) -> int:
    """Send all chains of `run` through an `opentelemetry.sdk.trace.TracerProvider`; returns the number of spans.

    A rollout's span ends when its file was whole and lasts as long as the record says; records carry no wall clock.
    A record without its file's event or its times has a span of 0 s. Raises ModuleNotFoundError where OpenTelemetry
    is not installed.
    """
    installed("opentelemetry", extra="otel")
    from opentelemetry.trace import Link

    tracer = provider.get_tracer("rlinfra_utils.tracing")
    contexts = _rollout_spans(run, tracer)
    for batch in run.batches.itertuples():
        links = [Link(contexts[rollout_id]) for rollout_id in batch.rollout_ids if rollout_id in contexts]
        attributes = {"run_id": run.run_id} | {name: getattr(batch, name) for name in _BATCH}
        stamp_ns = _ns(batch.time_unix_s)
        span = tracer.start_span("training_batch", links=links, start_time=stamp_ns, attributes=attributes)
        span.end(stamp_ns)
    return len(contexts) + len(run.batches)


def _rollout_spans(run: RunData, tracer: Any) -> dict[str, Any]:
    """One span a rollout; the context of each by rollout_id."""
    rollouts = per_rollout(run).drop_duplicates("rollout_id")
    chains = {chain.links["rollout_id"]: chain for chain in chains_of(run, rollouts["rollout_id"])}
    contexts = {}
    for row in rollouts.itertuples():
        end_ns = _ns(row.written_unix_s if row.written_unix_s == row.written_unix_s else run.last_unix_s or 0.0)
        start_ns = end_ns - (_ns(row.duration_s) if row.duration_s == row.duration_s else 0)
        attributes = {"run_id": run.run_id} | _attributes(chains[row.rollout_id])
        span = tracer.start_span("rollout", start_time=start_ns, attributes=attributes)
        span.end(end_ns)
        contexts[row.rollout_id] = span.get_span_context()
    return contexts


def _attributes(chain: Chain) -> dict[str, Any]:
    """The links that are there; OpenTelemetry has no null."""
    about = {"branch_id": chain.branch_id, "config_hash": chain.config_hash}
    return {name: value for name, value in (chain.links | about).items() if value is not None}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
