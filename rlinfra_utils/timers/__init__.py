"""How long each stage took, and which stages decided the total: spans over one or many processes.

Models: nested, attributed spans on tracks; work apart from waiting; the chain that sets the makespan.
Leaves out: sampling, kernel-level profiles, memory. Recording needs no torch; the CUDA modes load it.

    trace = Trace()
    with trace.span("step", warmup=step == 0):
        with trace.span("decode", track="engine") as span:
            ...
            span.set(tokens=512)
    trace.summary(); trace.critical_path(); trace.to_perfetto("engine.json")

Several processes: each writes its file, one reads them: `Trace.merge(["engine.json", "trainer.json"])`.
"""

from rlinfra_utils.timers.trace import Trace

__all__ = ["Trace"]
