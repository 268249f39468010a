"""What checkpoint folders of the transformers and TRL Trainer, of verl and of torch DCP hold, seen from outside.

Models: which component has a file, whether the file is whole as far as its container shows (zip directory,
safetensors header, JSON), what it cannot say. Leaves out the content of pickles, which are never loaded, and shards
of Megatron and DeepSpeed. Use: `found = LAYOUTS[recognise(path)](path)`.

Sources: transformers 5.24 trainer.py (file names of `_save_checkpoint`); verl fsdp_checkpoint_manager.py at 01ee5e04.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlinfra_utils.checkpoint import dcp
from rlinfra_utils.checkpoint.manifest import COMPLETE, MANIFEST, CheckpointError
from rlinfra_utils.doors import short

_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_RUN_FOLDER = re.compile(r"(step_|checkpoint-|global_step_)[0-9]+")
#: What DCP's HuggingFaceStorageWriter calls the file of one rank.
_DCP_SHARD = re.compile(r"shard-([0-9]{5})-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_VERL_SHARD = re.compile(r"(model|optim|extra_state)_world_size_([0-9]{1,9})_rank_([0-9]{1,9})\.pt")
#: What DCP folders hold of a component in part, whatever they name.
_DCP_PARTIAL = {
    "counters": "a step and no policy version",
    "data_position": "a loader's own state: a cursor, no dataset fingerprint",
}


@dataclass
class Found:
    """Components that are there whole, that are there in part (what the part lacks), and that are damaged."""

    present: set[str] = field(default_factory=set)
    partial: dict[str, str] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, component: str, files: Iterable[Path]) -> None:
        """Take a component whose files are `files`, if there are any: present, or corrupt by the first fault."""
        faults = [_fault(file) for file in files]
        if any(faults):
            self.corrupt[component] = next(fault for fault in faults if fault)
        elif faults:
            self.present.add(component)


def recognise(path: Path) -> str:
    """Whose layout a folder has: "transformers", "verl", "torch DCP", or ours.

    Raises CheckpointError for a folder of checkpoints.
    """
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed: {error.strerror or error}") from error
    if names & {MANIFEST, COMPLETE}:
        return "rlinfra"
    if "trainer_state.json" in names or names & {*_WEIGHTS, *_INDEXES, "optimizer.pt"}:
        return "transformers"
    if "actor" in names or "data.pt" in names:
        return "verl"
    if dcp.INDEX in names or any(name.endswith(dcp.SUFFIX) or _DCP_SHARD.fullmatch(name) for name in names):
        return "torch DCP"
    inner = sorted(name for name in names if _RUN_FOLDER.fullmatch(name))
    if inner:
        raise CheckpointError(f"{path}: holds checkpoints and is none; name one of them, such as {inner[-1]}")
    return "rlinfra"


def _transformers(path: Path) -> Found:
    found = Found()
    shards = _indexed(path, found)
    found.add("policy", shards or [path / name for name in _WEIGHTS if (path / name).exists()])
    found.add("optimizer", [path / name for name in ("optimizer.pt", "optimizer.bin") if (path / name).exists()])
    found.add("scheduler", path.glob("scheduler.pt"))
    found.add("rng", path.glob("rng_state*.pth"))
    state = path / "trainer_state.json"
    if state.exists():
        step = _json(state).get("global_step") if not _fault(state) else None
        if type(step) is int and step >= 0:
            found.partial["counters"] = f"trainer_state.json has global_step {step} and no policy version"
            found.partial["data_position"] = f"a resume skips {step} batches: no skip set, no dataset fingerprint"
        else:
            found.corrupt["counters"] = _fault(state) or f"trainer_state.json: global_step={short(step)}: no step"
    _tokenizer(path, found)
    if (path / "generation_config.json").exists():
        found.partial["decoding"] = "generation_config.json holds the model's defaults, not what the run drew with"
    if (path / "training_args.bin").exists():
        found.partial["layout"] = "training_args.bin is a pickle and is not read"
    shard_folders = [entry.name for entry in path.iterdir() if entry.is_dir()]
    if shard_folders:
        found.notes.append(f"folders are not read (DeepSpeed and FSDP keep shards in such): {', '.join(shard_folders)}")
    return found


def _indexed(path: Path, found: Found) -> list[Path]:
    """The weight files that an index names; a fault of the index is a fault of the policy."""
    for index in (path / name for name in _INDEXES):
        if not index.exists():
            continue
        named = _json(index).get("weight_map") if not _fault(index) else None
        if not isinstance(named, dict) or not named or not all(type(name) is str for name in named.values()):
            found.corrupt["policy"] = _fault(index) or f"{index.name}: weight_map={short(named)}: names no files"
            return []
        outside = [name for name in named.values() if Path(name).name != name or name in ("", ".", "..")]
        if outside:
            found.corrupt["policy"] = f"{index.name}: {short(outside[0])} leads out of the checkpoint; refused"
            return []
        return [path / name for name in sorted(set(named.values()))]
    return []


def _verl(path: Path) -> Found:
    found = Found()
    actor = path / "actor"
    shards = [_VERL_SHARD.fullmatch(entry.name) for entry in actor.iterdir()] if actor.is_dir() else []
    shards = [shard for shard in shards if shard]
    for kind, components in (("model", ["policy"]), ("optim", ["optimizer"]), ("extra_state", ["scheduler", "rng"])):
        mine = [shard for shard in shards if shard[1] == kind]
        for component in components:
            found.add(component, [actor / shard[0] for shard in mine])
            if mine and component not in found.corrupt and _ranks_fault(mine):
                found.corrupt[component] = _ranks_fault(mine)
    if re.fullmatch("global_step_[0-9]+", path.name):
        found.partial["counters"] = "the step stands in the folder's name alone; no policy version"
    if (path / "data.pt").exists():
        found.add("data_position", [path / "data.pt"])
        if found.present & {"data_position"}:
            found.present.remove("data_position")
            found.partial["data_position"] = "data.pt is the loader's cursor, ahead of training; no dataset fingerprint"
    if (actor / "fsdp_config.json").exists():
        found.add("layout", [actor / "fsdp_config.json"])
    _tokenizer(actor / "huggingface", found)
    if (actor / "dist_ckpt").exists():
        found.notes.append("actor/dist_ckpt holds Megatron's shards, which are not read")
    if (path / "critic").exists():
        found.notes.append("critic is not read")
    return found


def _torch_dcp(path: Path) -> Found:
    """The index says what was saved; a shard that it names and that is not whole may hold any part of it."""
    if not any(path.glob(f"*{dcp.SUFFIX}")) and not (path / dcp.INDEX).exists():
        return _dcp_safetensors(path)
    found, index_path = Found(), path / dcp.INDEX
    fault = _fault(index_path, container=False)
    if fault:
        because = ": DCP writes it last, so that the save never came to its end" if fault.endswith("missing") else ""
        return Found(corrupt={"policy": fault + because})
    try:
        index = dcp.read_index(index_path)
    except ValueError as error:
        return Found(corrupt={"policy": str(error)})
    files = [path / name for name in index.files]
    fault = "" if files else f"{dcp.INDEX}: names no file of shards"
    for component, keys in index.parts().items():
        if fault:
            found.corrupt[component] = fault
            continue
        found.add(component, files)
        if component in _DCP_PARTIAL and component in found.present:
            found.present.remove(component)
            found.partial[component] = f"{short(keys[0])}: {_DCP_PARTIAL[component]}"
    if "policy" in found.present:
        found.present.add("layout")
        found.notes.append(f"{len(files)} files of {index.num_ranks} ranks; DCP cuts them anew for another number")
    found.notes.append(f"{dcp.INDEX} is a pickle and was not loaded: its names are read, no tensor or hash is proven")
    return found


def _dcp_safetensors(path: Path) -> Found:
    """Shards of DCP's HuggingFaceStorageWriter, which keep their places in their own headers."""
    found = Found()
    shards = sorted(entry.name for entry in path.iterdir() if _DCP_SHARD.fullmatch(entry.name))
    numbers = {int(_DCP_SHARD.fullmatch(name)[1]) for name in shards}
    lost = sorted(set(range(1, max(numbers) + 1)) - numbers)
    found.add("policy", [path / name for name in shards])
    if lost:
        found.corrupt["policy"] = f"shard {lost[0]} of at least {max(numbers)} is missing"
    found.notes.append(f"{len(shards)} shards, whose number is recorded nowhere: a last one may be missing unseen")
    return found


def _ranks_fault(shards: list[re.Match]) -> str:
    sizes = sorted({int(shard[2]) for shard in shards})
    ranks = {int(shard[3]) for shard in shards}
    if len(sizes) > 1:
        return f"{shards[0][1]}: shards of world sizes {', '.join(map(str, sizes))} lie side by side"
    if len(ranks) != sizes[0] or max(ranks) >= sizes[0]:
        return f"{shards[0][1]}: {len(ranks)} shards of {sizes[0]} ranks"
    return ""


def _tokenizer(folder: Path, found: Found) -> None:
    if (folder / "tokenizer_config.json").exists():
        found.partial["versions"] = "tokenizer files without verifier, environment and engine versions"


def _json(path: Path) -> dict[str, Any]:
    """The object of a JSON file that `_fault` found whole."""
    return json.loads(path.read_bytes())


def _fault(path: Path, container: bool = True) -> str:
    """What is wrong with a file as far as its `container` shows, or its size alone; "" for nothing."""
    try:
        if not path.is_file():
            return f"{path.name}: is missing"
        if not path.stat().st_size:
            return f"{path.name}: is empty"
        return _container_fault(path) if container else ""
    except OSError as error:
        return f"{path.name}: cannot be read: {error.strerror or error}"


def _container_fault(path: Path) -> str:
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="np") as file:
                return "" if file.keys() else f"{path.name}: holds no tensor"
        except SafetensorError as error:
            return f"{path.name}: is no whole safetensors file: {' '.join(str(error).split())}"
    if path.suffix == ".json":
        try:
            return "" if isinstance(_json(path), dict) else f"{path.name}: is no JSON object"
        except (ValueError, RecursionError) as error:
            return f"{path.name}: is no JSON: {error}"
    if path.suffix == dcp.SUFFIX:
        return "" if dcp.ends_whole(path) else f"{path.name}: is cut off, or holds no torch archives"
    # torch.save writes a zip archive, whose directory stands at the end: a truncated one has none.
    return "" if zipfile.is_zipfile(path) else f"{path.name}: is no whole torch archive"


#: A reader of each foreign layout.
LAYOUTS: dict[str, Callable[[Path], Found]] = {
    "transformers": _transformers,
    "verl": _verl,
    "torch DCP": _torch_dcp,
}
