"""The policy behind synthetic rollouts: a distribution over a small vocabulary that can be written down.

Models: end-of-sequence that comes with the hazard of the length law, so that the lengths and the log-probs
belong to one autoregressive distribution; weights that drift from version to version.
Leaves out: dependence on the tokens themselves (a token's distribution depends on its position and version).
Use: `policy(seed, workload).logprobs(versions, positions, tokens)` says what any version gives to any token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinfra_utils.synthetic.workload import DEFAULT, LogNormal, Pareto, Workload, check_request

EOS = 0  # token id; the others are 1, 2, ...
NUM_CONTEXTS = 16
LOGIT_STD = 1.5
MAX_POSITION = 2**28
GUIDE_BINS = 1024


@dataclass(frozen=True)
class Policy:
    """The behaviour policy: one distribution over tokens for each version and position in the response.

    Policy token number `position` (1 is the first) is end-of-sequence with the length law's own hazard
    h(position) = P(length = position | length >= position), else token i with softmax(logits)[i], of logits that
    depend on the version and on position % NUM_CONTEXTS.
    """

    lengths: LogNormal | Pareto
    oldest_version: int
    logits: np.ndarray  # (version - oldest_version, position % NUM_CONTEXTS, token id - 1)

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 (end-of-sequence) to vocab_size - 1."""
        return self.logits.shape[2] + 1

    def logprobs(self, versions: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Log-probs in nats of `tokens`, elementwise; int arrays of one shape (positions count from 1).

        Raises ValueError for a version, position or token that the policy does not have.
        """
        num_versions, _, num_others = self.logits.shape
        versions, positions, tokens = np.asarray(versions), np.asarray(positions), np.asarray(tokens)
        for name, values, low, high in (
            ("versions", versions, self.oldest_version, self.oldest_version + num_versions - 1),
            ("positions", positions, 1, MAX_POSITION),
            ("tokens", tokens, 0, num_others),
        ):
            if values.size and not low <= values.min() <= values.max() <= high:
                raise ValueError(f"{name}: {values.min()} to {values.max()} are not all in {low} to {high}")
        log_go, log_stop = self._hazard(positions.max(initial=0))
        shifted = self.logits - self.logits.max(axis=2, keepdims=True)
        log_softmax = shifted - np.log(np.exp(shifted).sum(axis=2, keepdims=True))
        row = (versions - self.oldest_version) * NUM_CONTEXTS + positions % NUM_CONTEXTS
        found = log_softmax.ravel()[row * num_others + tokens - 1]  # of end-of-sequence: a neighbour's, replaced below
        found += log_go[positions]
        stops = np.flatnonzero(tokens == EOS)
        found[stops] = log_stop[positions[stops]]
        return found

    def _hazard(self, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs of going on and of stopping at positions 0 (unused) to `longest`."""
        survival = self.lengths.log_survival(np.arange(longest + 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            log_go = np.diff(survival, prepend=0.0)
            log_go[np.isnan(log_go)] = -np.inf  # beyond what floats can reach
            return log_go, np.log(-np.expm1(log_go))

    def draw(self, rng: np.random.Generator, versions: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """One token other than end-of-sequence for each (version, position).

        It is the first token whose share of [0, 1) ends beyond a uniform draw, looked up in a guide table
        (Chen and Asau, "On generating random variates from an empirical distribution", 1974).
        """
        shares = np.exp(self.logits - self.logits.max(axis=2, keepdims=True)).reshape(-1, self.logits.shape[2])
        ends = np.cumsum(shares, axis=1)
        ends /= ends[:, -1:]
        bins = np.arange(GUIDE_BINS) / GUIDE_BINS
        guide = np.stack([np.searchsorted(row_ends, bins, side="right") for row_ends in ends])

        row = (versions - self.oldest_version) * NUM_CONTEXTS + positions % NUM_CONTEXTS
        uniform = rng.random(row.size)
        found = guide[row, (uniform * GUIDE_BINS).astype(np.int64)]  # right, or too early where a bin holds an end
        early = np.flatnonzero(ends[row, found] <= uniform)
        while early.size:
            found[early] += 1
            early = early[ends[row[early], found[early]] <= uniform[early]]
        return 1 + found


def policy(seed: int, workload: Workload = DEFAULT) -> Policy:
    """The policy that `rollout_table(num, seed, workload)` draws from, in all versions up to the current one.

    Raises ValueError for a seed that is negative or not whole.
    """
    check_request(seed, workload)
    rng = np.random.default_rng([seed, 0])
    shape = (workload.max_lag + 1, NUM_CONTEXTS, workload.vocab_size - 1)
    steps = rng.standard_normal(shape)
    steps[0] *= LOGIT_STD
    steps[1:] *= workload.version_drift_nats
    return Policy(workload.lengths, workload.current_version - workload.max_lag, np.cumsum(steps, axis=0))
