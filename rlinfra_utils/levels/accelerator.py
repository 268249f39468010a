"""What an accelerator can do, by its compute capability: native formats, and how vLLM is to be started on it.

The one place for the choices of a T4 (7.5): float16, Triton attention, half of the card's memory. Leaves out
accelerators other than CUDA's and ROCm's, and every speed. Nothing here imports torch.
Use: `choose_dtype((7, 5))`, `vllm_options((7, 5))`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlinfra_utils.doors import choice

Capability = tuple[int, int]

#: Lowest CUDA compute capability with native support: NVIDIA's CUDA programming guide (arithmetic tables) for the
#: formats; vLLM 0.32.0's `supports_compute_capability` for the attention backends. FlashInfer is made for 7.5 and up,
#: but vLLM holds it back to 8.0 while it is broken there (flashinfer issue 3620, June 2026).
NEEDS_CAPABILITY = {"bfloat16": (8, 0), "fp8": (8, 9), "flash_attention": (8, 0), "flashinfer": (8, 0)}

#: The release that was read for the attention backends and the options below.
VLLM_VERSION = "0.32.0"

#: Share of the card that a vLLM server may take. vLLM's own 0.92 leaves no room for the notebook's model beside it,
#: and the server refuses to start unless that share is free.
VLLM_MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Support:
    """A yes or no with its reason; true or false in a condition."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def supports(feature: str, capability: Capability | None) -> Support:
    """Whether compute `capability` has `feature`, a key of NEEDS_CAPABILITY; None means no accelerator.

    Raises ValueError for an unknown feature, or a capability that is not two integers.
    """
    needs = NEEDS_CAPABILITY[choice("feature", feature, NEEDS_CAPABILITY)]
    wanted = f"{feature} needs compute capability {needs[0]}.{needs[1]} or higher"
    if capability is None:
        return Support(False, f"{wanted}; there is no accelerator")
    if not (isinstance(capability, tuple) and [type(part) for part in capability] == [int, int]):
        raise ValueError(f"capability={capability!r}: needs a pair of integers such as (7, 5)")
    return Support(capability >= needs, f"{wanted}; this one has {capability[0]}.{capability[1]}")


def native_bfloat16(capability: Capability | None) -> bool:
    """Whether bfloat16 is native: capability 8.0 or higher. Raises ValueError as `supports` does.

    `torch.cuda.is_bf16_supported()` also says yes where it is only emulated, such as on a T4.
    """
    return bool(supports("bfloat16", capability))


def choose_dtype(capability: Capability | None) -> str:
    """The name of torch's dtype for a model: "bfloat16" where native, else "float16"; "float32" on a CPU.

    Raises ValueError as `supports` does.
    """
    if capability is None:
        return "float32"
    return "bfloat16" if native_bfloat16(capability) else "float16"


def vllm_options(capability: Capability | None) -> list[str]:
    """Command-line options of a vLLM server for this accelerator, beside those that any machine takes.

    Empty on a CPU, whose KV pool has a size of its own. Where neither FlashAttention nor FlashInfer runs, such as on
    a T4, Triton's attention is named, so that the server does not depend on vLLM's own search.
    Read from VLLM_VERSION's source; no run on a GPU is stored. Raises ValueError as `supports` does.
    """
    if capability is None:
        return []
    options = ["--gpu-memory-utilization", str(VLLM_MEMORY_SHARE)]
    if not (supports("flash_attention", capability) or supports("flashinfer", capability)):
        options += ["--attention-backend", "TRITON_ATTN"]
    return options
