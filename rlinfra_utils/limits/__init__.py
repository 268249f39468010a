"""How far a stage is from the machine's limit: the roofline of decode, prefill and training.

Models: a step takes at least its bytes over the memory bandwidth, and at least its floating-point operations
over the peak rate; the larger of the two is the bound (Williams et al., "Roofline", 2009). Leaves out:
caches that hold the weights, kernel launches, communication, and overlap of the two, so a bound is never beaten
for a model larger than the cache, and rarely reached.
Use: `decode(ModelSpec.named("Qwen2.5-7B"), device("H100"), batch=64, context_tokens=4096)`.
"""

from rlinfra_utils.limits.machines import Device, device, known_devices, measure
from rlinfra_utils.limits.roofline import Bound, compute_bound_batch, concurrency, decode, prefill, training
