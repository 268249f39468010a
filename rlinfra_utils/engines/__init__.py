"""One small interface over real engines, and the log-probs that a trainer gives the same tokens.

Models: generation with the behaviour policy's own log-probs, weights loaded by version, teacher forcing.
Leaves out serving: batches in, completions out. Needs torch and transformers.
"""

from rlinfra_utils.doors import installed

installed("torch", "transformers", extra="torch")

from rlinfra_utils.engines.generation import Completion, Generation
from rlinfra_utils.engines.hf import HFEngine
from rlinfra_utils.engines.logprobs import teacher_forced_logprobs
from rlinfra_utils.engines.models import SmallModel, load_small_model
from rlinfra_utils.engines.padding import pad_left
from rlinfra_utils.engines.sampling import processed_logprobs, resolve
from rlinfra_utils.engines.vllm import VLLMServer
from rlinfra_utils.engines.vllm_process import EngineError
