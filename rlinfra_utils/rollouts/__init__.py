"""What a rollout must say: the record, its verdict, its files."""

from rlinfra_utils.rollouts.codes import CODES, STATUSES, Code, example
from rlinfra_utils.rollouts.convert import from_json, from_table, to_json, to_table
from rlinfra_utils.rollouts.intake import triage
from rlinfra_utils.rollouts.record import (
    SCHEMA,
    SCHEMA_VERSION,
    STOP_REASONS,
    Decoding,
    Rollout,
    VersionSpan,
    is_truncated,
)
from rlinfra_utils.rollouts.recovery import recover
from rlinfra_utils.rollouts.storage import RolloutFileError, read, write
from rlinfra_utils.rollouts.table import validate_table
from rlinfra_utils.rollouts.validate import validate
from rlinfra_utils.rollouts.verdict import Finding, Verdict
