"""How far the data are from the policy that trains on them: lag, ratios, effective sample size, corrections.

Models: policy versions and two log-probs (trainer, behaviour) of each sampled token, in nats. Leaves out: the
cause of a difference (`mismatch`) and the loss (`policy`). Needs numpy only; all arithmetic is float64.

    d = log_ratio(trainer, behavior, mask)                     # the mask acts first, then the exponential
    summarize(trainer, behavior, mask).sequence.normalized_ess
    correction = correct(d, mask, "token_truncate", high=2.0)  # .weights .keep .stats
    lag(9, record.version_spans).max()

Undefined is never 0: an answer without a token is NaN, one number over no token raises ValueError, and
statistics of no token have counts of 0, means of NaN, and merge (`a + b`) without effect.
"""

from rlinfra_utils.offpolicy.clipping import Outside, clip_counts, clip_fraction, ppo_clip_fraction
from rlinfra_utils.offpolicy.correction import MODES, Correction, CorrectionStats, correct
from rlinfra_utils.offpolicy.lengths import LengthBin
from rlinfra_utils.offpolicy.ratios import geometric_log_ratio, log_ratio, sequence_log_ratio, support_gap
from rlinfra_utils.offpolicy.summary import Summary, summarize
from rlinfra_utils.offpolicy.versions import is_fresh, lag
from rlinfra_utils.offpolicy.weights import WeightStats, ess, ess_from_log, normalized_ess, normalized_ess_from_log
