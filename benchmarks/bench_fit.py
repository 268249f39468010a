"""What the fit finder takes: the map of Qwen2.5-7B on eight cards of 80 GiB, 12 group sizes by 12 lengths.

Measures `memory.fit_map` from a name to a table, the config's reading included. Asserts that the map has a cell for
each pair, both limits, and that a smaller load never fails where a larger one fits.
Run: `python -m benchmarks.bench_fit`.
"""

import sys
import time

from benchmarks import report
from rlinfra_utils.memory import GIB, ModelSpec, fit_map

GROUP_SIZES = [2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256]
LENGTHS_TOKENS = [512, 1024, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 65_536]


def main():
    start_s = time.perf_counter()
    table = fit_map(ModelSpec.named("Qwen2.5-7B"), 0.9 * 80 * GIB, 8, GROUP_SIZES, LENGTHS_TOKENS, prompts_per_gpu=4)
    elapsed_s = time.perf_counter() - start_s

    limits = table.pivot(index="group_size", columns="seq_tokens", values="limited_by")
    assert limits.shape == (len(GROUP_SIZES), len(LENGTHS_TOKENS))
    assert not limits.isna().any(axis=None)
    assert set(table["limited_by"]) == {"fits", "generate", "train"}
    is_fit = (limits == "fits").astype(int)
    assert (is_fit.diff().iloc[1:] <= 0).all(axis=None)
    assert (is_fit.diff(axis=1).iloc[:, 1:] <= 0).all(axis=None)

    assert len(table) == 144
    return report("fit", {"seconds for a map of 144 cells": elapsed_s}, {"model": "Qwen2.5-7B", "gpus": "8 x 80 GiB"})


if __name__ == "__main__":
    sys.exit(main())
