"""The infrastructure of online RL for language models: predicted, measured, compared.

Modules by floor; a file imports only from floors below its own. Importing this package, or any module of floors
0 to 2, loads neither torch nor transformers. Leaves out a framework for production: `stacks` maps seven of them.

0. `doors` the checks of arguments
1. `timers` how long · `memory` how much · `rollouts` what a rollout must say · `offpolicy` lag, ratios, corrections ·
   `pipeline` closed forms of pipelines, queues and staleness
2. `limits` how far from the machine's limit · `synthetic` seeded rollouts · `simulator` the loop as events ·
   `mismatch` where two log-probs part · `stacks` seven stacks, their records and the choice among them ·
   `checkpoint` what a run needs to resume · `tracing` one rollout and a whole run, from the files it wrote
3. `policy` a tiny real policy trained by GRPO · `engines` one interface over real engines · `sync` weights published
   and proven · `sharded` one model over several ranks · `plan` a run, from a brief to what a stack reads
4. `cluster` the loop as real processes on Ray, and its twin · `recovery` a run that may be killed anywhere

Beside the floors: `levels` what this machine can run · `exercises` graded problems · `plots` pictures
"""

__version__ = "0.1.0"
