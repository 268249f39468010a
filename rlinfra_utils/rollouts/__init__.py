"""What a rollout must say: the record, its verdict, its files."""

from rlinfra_utils.rollouts.record import (
    SCHEMA,
    SCHEMA_VERSION,
    STOP_REASONS,
    Decoding,
    Rollout,
    VersionSpan,
    is_truncated,
)
