"""What a rollout must say: the record, its verdict, its files.

Models one answer with its author by token, its behaviour policy, its outcome and its chain of identifiers; a closed
list of what may be wrong with it. Leaves out advantages, the loss, and who produces or consumes records.

    verdict = validate(record, current_version=9, max_lag=2)      # a dict or a Rollout: accept, quarantine or reject
    validate_table(table, current_version=9, max_lag=2)           # the same rules, a row each, by array operations
    triage(records, "out/rollouts", current_version=9, max_lag=2)  # sorted by verdict; nothing is dropped
    write(records, "out/batch.parquet"); table = read("out/batch.parquet")
"""

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
