"""What synthetic rollouts are like: the laws of their lengths, and every other share, rate and limit.

Models: parameters alone, with units in their names and checked when they are set.
Leaves out: drawing (`table`, `spans`).
Use: `Workload(lengths=Pareto(minimum_tokens=16, alpha=1.2), max_tokens=1024, tool_share=0)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from rlinfra_utils.doors import short


def check(name: str, value, low: float, high: float = 2.0**53, *, above: bool = False, whole: bool = False) -> None:
    """Raise ValueError, naming field and value, unless `value` is a number in [low, high] ((low, high] if `above`)."""
    kind = "a whole number" if whole else "a number"
    number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not (number and low <= value <= high and not (above and value == low)):
        raise ValueError(f"{name}: {short(value)} is not {kind} {'above' if above else 'from'} {low:g} to {high:g}")


@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal: `median_tokens`, and `sigma`, the standard deviation of the log.

    Raises ValueError for one that is not above 0.
    """

    median_tokens: float
    sigma: float

    def __post_init__(self):
        check("median_tokens", self.median_tokens, 0, above=True)
        check("sigma", self.sigma, 0, above=True)

    @property
    def mean_tokens(self) -> float:
        """Mean of the continuous law, median * exp(sigma^2 / 2); a drawn length is at most one token more."""
        with np.errstate(over="ignore"):
            return float(self.median_tokens * np.exp(self.sigma**2 / 2))

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """`num` draws of the continuous law."""
        with np.errstate(over="ignore"):
            return self.median_tokens * np.exp(self.sigma * rng.standard_normal(num))

    def log_survival(self, tokens: np.ndarray) -> np.ndarray:
        """log P(X >= tokens), elementwise; tokens >= 0."""
        with np.errstate(divide="ignore", over="ignore"):
            z = np.log(tokens / self.median_tokens) / (self.sigma * math.sqrt(2))
            tail = 0.5 * np.frompyfunc(math.erfc, 1, 1)(np.abs(z)).astype(float)
            return np.where(z > 0, np.log(tail), np.log1p(-tail))  # each side keeps its small probabilities


@dataclass(frozen=True)
class Pareto:
    """Lengths with P(X >= x) = (minimum_tokens / x)^alpha. Infinite mean for alpha <= 1, variance for <= 2.

    Raises ValueError for a parameter that is not above 0.
    """

    minimum_tokens: float
    alpha: float

    def __post_init__(self):
        check("minimum_tokens", self.minimum_tokens, 0, above=True)
        check("alpha", self.alpha, 0, above=True)

    @property
    def mean_tokens(self) -> float:
        """Mean of the continuous law, minimum * alpha / (alpha - 1); a drawn length is at most one token more."""
        return self.minimum_tokens * self.alpha / (self.alpha - 1) if self.alpha > 1 else math.inf

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """`num` draws of the continuous law."""
        with np.errstate(over="ignore"):
            return self.minimum_tokens * (1 - rng.random(num)) ** (-1 / self.alpha)

    def log_survival(self, tokens: np.ndarray) -> np.ndarray:
        """log P(X >= tokens), elementwise; tokens >= 0."""
        return -self.alpha * np.log(np.maximum(tokens / self.minimum_tokens, 1.0))


@dataclass(frozen=True)
class Workload:
    """What the rollouts are like. A share is in [0, 1]; each field is checked here, and ValueError names it.

    Lengths count the policy's own tokens up to end-of-sequence: a draw x of the law becomes floor(x) + 1 tokens.
    An attempt is cut by `max_tokens` (stop_reason "length") or, where its engine is too slow, by `time_limit_s`
    ("timeout"); None is no limit. A law of infinite mean needs `max_tokens`.
    """

    lengths: LogNormal | Pareto = LogNormal(48, 0.8)
    prompt_lengths: LogNormal | Pareto = LogNormal(16, 0.3)
    max_tokens: int | None = 256
    time_limit_s: float | None = 6.0  # decoding time of one attempt
    decode_s_per_token: float = 0.02  # median over rollouts
    speed_sigma: float = 0.3  # of the log of a rollout's seconds per token
    tool_share: float = 0.2  # of the rollouts
    max_tool_calls: int = 3  # a rollout with tools makes 1 to this many
    mean_observation_tokens: float = 12.0  # environment tokens a call, geometric
    mean_tool_s: float = 0.5  # seconds a call, exponential
    retry_share: float = 0.02  # of the attempts, which fail and are repeated from the start
    group_size: int = 8  # rollouts of one prompt; the table's last group may be cut off
    degenerate_share: float = 0.3  # of the groups: all rewards equal
    current_version: int = 100  # the trainer's
    lag_shares: tuple[float, ...] = (0.6, 0.3, 0.1)  # share of rollouts whose last token has lag 0, 1, 2, ...
    straddle_share: float = 0.1  # of the responses of two tokens and more: one update in the middle
    version_drift_nats: float = 0.1  # standard deviation of a logit's change from one version to the next
    vocab_size: int = 64  # end-of-sequence (id 0) included; with two, every token would be certain

    def __post_init__(self):
        for name in ("lengths", "prompt_lengths"):
            law = getattr(self, name)
            if not isinstance(law, LogNormal | Pareto):
                raise ValueError(f"{name}: {str(law)[:40]!r} is not a LogNormal or a Pareto")
            if math.isinf(law.mean_tokens) and (name == "prompt_lengths" or self.max_tokens is None):
                raise ValueError(f"{name}: {law} has an infinite mean; cap it with max_tokens (prompts have no cap)")
        if self.max_tokens is not None:
            check("max_tokens", self.max_tokens, 1, whole=True)
        if self.time_limit_s is not None:
            check("time_limit_s", self.time_limit_s, 0, above=True)
        for name in ("tool_share", "degenerate_share", "straddle_share"):
            check(name, getattr(self, name), 0, 1)
        check("retry_share", self.retry_share, 0, 0.99)
        check("decode_s_per_token", self.decode_s_per_token, 0, 3600, above=True)
        check("speed_sigma", self.speed_sigma, 0, 5)
        check("mean_tool_s", self.mean_tool_s, 0, 86400)
        check("mean_observation_tokens", self.mean_observation_tokens, 1, 1e6)
        check("version_drift_nats", self.version_drift_nats, 0, 1)
        check("max_tool_calls", self.max_tool_calls, 1, 1000, whole=True)
        check("group_size", self.group_size, 2, 65536, whole=True)
        check("vocab_size", self.vocab_size, 3, 65536, whole=True)
        self._check_versions()

    def _check_versions(self) -> None:
        if not isinstance(self.lag_shares, tuple) or not self.lag_shares:
            raise ValueError(f"lag_shares: {str(self.lag_shares)[:40]!r} is not a tuple of shares of lag 0, 1, 2, ...")
        for lag, share in enumerate(self.lag_shares):
            check(f"lag_shares[{lag}]", share, 0, 1)
        if abs(sum(self.lag_shares) - 1) > 1e-9:
            raise ValueError(f"lag_shares: {self.lag_shares} add up to {sum(self.lag_shares):g}, not 1")
        check("current_version", self.current_version, self.max_lag, whole=True)

    @property
    def max_lag(self) -> int:
        """The largest lag a token can have: that of `lag_shares`, one more where an update comes in the middle."""
        return len(self.lag_shares) - 1 + (self.straddle_share > 0)


DEFAULT = Workload()


def check_request(seed: int, workload: Workload, num: int = 1) -> None:
    """Raise ValueError unless `num` rollouts of this seed and workload can be asked for."""
    check("num", num, 1, whole=True)
    check("seed", seed, 0, whole=True)
    if not isinstance(workload, Workload):
        raise ValueError(f"workload: {str(workload)[:40]} is not a Workload")
