"""Where two log-probs of the same tokens part, and the likeliest cause.

Models: one difference, trainer - behaviour in nats, put to every usual cause; a cause is tested by
recomputing the behaviour log-probs under it and looking at what is left. Leaves out: two causes at once, and
the cure (`offpolicy.correct`), which must not cover up a contract bug. Needs numpy only.

    print(compare(trainer, behavior, mask))                           # sizes, places, first diverging token
    print(diagnose(logits, tokens, behavior, mask, decoding))          # ranked findings, the likeliest first

Order of diagnosis: freeze tokens and masks, compare at zero lag, find the first token that differs; lag only then.
"""

from rlinfra_utils.mismatch.compare import Bin, Comparison, compare
from rlinfra_utils.mismatch.diagnose import diagnose
from rlinfra_utils.mismatch.distributions import round_to, token_logprobs
from rlinfra_utils.mismatch.evidence import Evidence
from rlinfra_utils.mismatch.findings import CAUSES, Cause, Diagnosis, Finding
