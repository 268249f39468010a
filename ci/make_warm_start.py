"""Make the warm start: the tiny policy, trained on worked sums until it knows them but is unsure.

Labels are smoothed: a fifth of the target is spread over all tokens. So the policy's likeliest answer is nearly
always right, while an answer drawn at temperature 1 is right about every second time and sometimes malformed.
Leaves out: bit-equal weights on other machines; what was measured goes into `provenance.json`.
Use: `python -m ci.make_warm_start` writes `rlinfra_utils/data/warm_start/` (a few minutes on one core).
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path

import torch
import transformers

from rlinfra_utils import policy
from rlinfra_utils.engines import HFEngine

SEED = 0
NUM_STEPS = 800
BATCH = 128
LR = 2e-3
WARMUP_STEPS = 50
LABEL_SMOOTHING = 0.2
NUM_EVAL_PROMPTS = 2000
#: Outside the range of the seeds 0 .. NUM_STEPS - 1 that `policy.supervise` draws its sums from.
EVAL_SEED = 1_000_000
#: The bar for a warm start: right this often at temperature 1, so that there is something to learn from and to learn.
CORRECTNESS = (0.3, 0.6)
MAX_BYTES = 1_500_000


def measure(model, tokenizer) -> dict[str, float]:
    """Share of right and of well-formed answers at temperature 1, and of right ones by greedy decoding."""
    engine = HFEngine(model, tokenizer)
    sampled = policy.evaluate(engine, tokenizer, NUM_EVAL_PROMPTS, EVAL_SEED)
    greedy = policy.DECODING.model_copy(update={"temperature": 0.0})
    return {
        "correctness_sampled": sampled["correctness"],
        "format_sampled": sampled["format"],
        "correctness_greedy": policy.evaluate(engine, tokenizer, NUM_EVAL_PROMPTS, EVAL_SEED, greedy)["correctness"],
    }


def write(model, tokenizer, measured: dict[str, float], folder: Path) -> None:
    """The folder in Hugging Face form, float32 safetensors, with `provenance.json` beside them."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    provenance = {
        "script": "python -m ci.make_warm_start",
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "num_params": model.num_parameters(),
        "storage_dtype": "float32",
        "seed": SEED,
        "supervised_steps": NUM_STEPS,
        "batch": BATCH,
        "lr": LR,
        "label_smoothing": LABEL_SMOOTHING,
        "num_eval_prompts": NUM_EVAL_PROMPTS,
        **measured,
        "tokenizer_version": policy.tokenizer_version(tokenizer),
        "chat_template_version": policy.chat_template_version(tokenizer),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


def main() -> int:
    """Train, measure, and write the folder if the bar is met; returns the exit status."""
    tokenizer, model = policy.make_tokenizer(), policy.tiny_llama(SEED)
    options = {"warmup_steps": WARMUP_STEPS, "label_smoothing": LABEL_SMOOTHING}
    policy.supervise(model, tokenizer, num_steps=NUM_STEPS, batch_size=BATCH, lr=LR, **options)
    measured = measure(model, tokenizer)
    print(measured)
    if not CORRECTNESS[0] <= measured["correctness_sampled"] <= CORRECTNESS[1]:
        print(f"correctness_sampled={measured['correctness_sampled']} outside {CORRECTNESS}: nothing written")
        return 1
    write(model, tokenizer, measured, policy.WARM_START)
    num_bytes = sum(path.stat().st_size for path in policy.WARM_START.iterdir())
    print(f"{policy.WARM_START.name}: {num_bytes:,} bytes of at most {MAX_BYTES:,}")
    return 0 if num_bytes <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
