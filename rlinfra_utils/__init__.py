"""The infrastructure of online RL for language models: predicted, measured, compared.

Modules by floor; a file imports only from floors below its own. Importing this package, or any module of floors
1 and 2, loads neither torch nor transformers.

1. `timers` how long · `memory` how much · `rollouts` what a rollout must say · `offpolicy` lag, ratios, corrections ·
   `pipeline` closed forms of pipelines, queues and staleness
2. `limits` how far from the machine's limit · `synthetic` seeded rollouts · `simulator` the loop as events ·
   `mismatch` where two log-probs part · `checkpoint` what a run needs to resume
3. `policy` a tiny real policy trained by GRPO · `engines` one interface over real engines

Beside the floors: `levels` what this machine can run · `exercises` graded problems · `plots` pictures
"""

__version__ = "0.1.0"
