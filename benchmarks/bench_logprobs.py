"""What teacher-forced log-probs take, in chunks against the full log-softmax, on a model with known answers.

Measures extra memory as the rise of the peak resident set (VmHWM of Linux, reset before the call), each way in a
process of its own, and time by turns in one process, on one thread. Leaves out the transformer: the head differs.
Run: `python -m benchmarks.bench_logprobs`.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import report
from rlinfra_utils.engines import teacher_forced_logprobs

BATCH, SEQ, VOCAB, HIDDEN = 4, 256, 151_936, 256
NUM_TURNS = 5


class TableModel(torch.nn.Module):
    """Logits after token i are column i % HIDDEN of the head's weight: hidden states are one-hot, times a parameter."""

    def __init__(self):
        super().__init__()
        self.base_model = TableBase()
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        torch.nn.init.normal_(self.head.weight, generator=torch.Generator().manual_seed(0))

    def get_output_embeddings(self):
        """The head, as in transformers."""
        return self.head

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False, logits_to_keep=0):
        """Logits of the last `logits_to_keep` columns, 0 for all."""
        hidden = self.base_model(input_ids).last_hidden_state
        return SimpleNamespace(logits=self.head(hidden[:, -logits_to_keep:]))


class TableBase(torch.nn.Module):
    """One-hot hidden states."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, ids):
        """Hidden states (batch, seq, HIDDEN)."""
        one_hot = torch.nn.functional.one_hot(ids % HIDDEN, HIDDEN).float()
        return SimpleNamespace(last_hidden_state=one_hot * self.scale)


def full_logprobs(model, ids):
    return model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


WAYS = {"full": full_logprobs, "chunked": teacher_forced_logprobs}


def known_sum(model, ids):
    """Sum of all log-probs from the head's columns, in double precision."""
    columns = model.head.weight.detach().T.double()
    logsumexp = torch.cat([part.logsumexp(-1) for part in columns.split(16)])
    before, target = ids[:, :-1] % HIDDEN, ids[:, 1:]
    return (columns[before, target] - logsumexp[before]).sum().item()


def run(way, model, ids, with_gradient):
    """Seconds and checksum of one pass; with gradients the pass goes back as well."""
    model.zero_grad()
    start_s = time.perf_counter()
    with torch.set_grad_enabled(with_gradient):
        logprobs = WAYS[way](model, ids)
        if with_gradient:
            logprobs.sum().backward()
    return time.perf_counter() - start_s, logprobs.double().sum().item()


def inputs():
    return TableModel(), torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))


def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def measure_memory(way, with_gradient):
    """In a process of its own: the rise of the peak resident set above what model and ids take."""
    torch.set_num_threads(1)
    model, ids = inputs()
    model.head(torch.zeros(1, HIDDEN))  # The matrix library sets itself up.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    _, checksum = run(way, model, ids, with_gradient)
    print(json.dumps({"bytes": peak_bytes() - before, "checksum": checksum}))


def memory(way, with_gradient):
    command = [sys.executable, "-m", "benchmarks.bench_logprobs", way, str(int(with_gradient))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main():
    torch.set_num_threads(1)
    model, ids = inputs()
    expected = known_sum(model, ids)
    taken = {(way, grad): memory(way, grad) for way in WAYS for grad in (False, True)}
    turns = {key: [] for key in taken}
    for turn in range(NUM_TURNS):
        for way, grad in taken:
            if turn == 0 or not grad:
                turns[way, grad].append(run(way, model, ids, grad))
    for key, values in turns.items():
        for checksum in [taken[key]["checksum"], *(checksum for _, checksum in values)]:
            assert abs(checksum - expected) < 1e-6 * abs(expected), f"{key}: {checksum}, known {expected}"

    print(f"batch {BATCH}, {SEQ} tokens, vocabulary {VOCAB:,}, hidden {HIDDEN}, float32; the same sum {expected:.3f}")
    measured = {}
    for grad, label in ((False, ""), (True, ", with gradients")):
        full, chunked = (taken[way, grad]["bytes"] for way in WAYS)
        measured[f"extra memory, share of full log-softmax's{label}"] = chunked / full
        full_s, chunked_s = (min(s for s, _ in turns[way, grad]) for way in WAYS)
        measured[f"time, ratio to full log-softmax's{label}"] = chunked_s / full_s
        print(f"full{label}: {full / 2**30:.3f} GiB, {full_s:.3f} s; chunked:", end=" ")
        print(f"{chunked / 2**30:.3f} GiB, {chunked_s:.3f} s")
    return report("logprobs", measured, {"batch": BATCH, "seq": SEQ, "vocab": VOCAB, "hidden": HIDDEN})


if __name__ == "__main__":
    if sys.argv[1:]:
        measure_memory(sys.argv[1], sys.argv[2] == "1")
    else:
        sys.exit(main())
