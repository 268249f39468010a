"""What checkpoint folders of the transformers and TRL Trainer, verl, SkyRL and torch DCP hold, seen from outside.

Models: which component has a file, whether the file is whole (`outside.py`), what it cannot say. Leaves out the
content of pickles, which are never loaded, and Megatron's shards. Use: `found = LAYOUTS[recognise(path)](path)`.

Sources: transformers 5.24 trainer.py (file names of `_save_checkpoint`); accelerate 1.15 utils/fsdp_utils.py; verl
fsdp_checkpoint_manager.py at 01ee5e04; SkyRL fsdp_strategy.py at 065f2a1e; DeepSpeed engine.py (`save_checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from rlinfra_utils.checkpoint import dcp
from rlinfra_utils.checkpoint.manifest import COMPLETE, MANIFEST, CheckpointError
from rlinfra_utils.checkpoint.outside import Found, fault, read_json
from rlinfra_utils.doors import short

_WHOLE = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
_WEIGHTS = (*_WHOLE, "adapter_model.safetensors", "adapter_model.bin")
#: Folders of accelerate's FSDP with SHARDED_STATE_DICT, each a DCP checkpoint.
_FSDP_FOLDERS = {"policy": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_RUN_FOLDER = re.compile(r"(step_|checkpoint-|global_step_)[0-9]+")
#: What DCP's HuggingFaceStorageWriter calls the file of one rank.
_DCP_SHARD = re.compile(r"shard-([0-9]{5})-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
#: ZeRO 1 and 2 keep the policy whole in one file a model-parallel rank, ZeRO 3 in one a rank.
_ZERO_SHARD = re.compile(r"(?:[a-z0-9]+_)?(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{2,9})_(model|optim)_states\.pt")
_VERL_SHARD = re.compile(r"(model|optim|extra_state)_world_size_([0-9]{1,9})_rank_([0-9]{1,9})\.pt")
#: What DCP folders hold of a component in part, whatever they name.
_DCP_PARTIAL = {
    "counters": "a step and no policy version",
    "data_position": "a loader's own state: a cursor, no dataset fingerprint",
}


def recognise(path: Path) -> str:
    """Whose layout a folder has: "transformers", "verl", "SkyRL", "torch DCP", or ours.

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
    if "policy" in names and names & {"data.pt", "trainer_state.pt"}:
        return "SkyRL"
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
    if "policy" in found.present and not shards and not any((path / name).exists() for name in _WHOLE):
        found.notes.append("an adapter alone: the base that adapter_config.json names is not here")
    _fsdp_folders(path, found)
    found.add("scheduler", path.glob("scheduler.pt"))
    found.add("rng", path.glob("rng_state*.pth"))
    state = path / "trainer_state.json"
    if state.exists():
        step = read_json(state).get("global_step") if not fault(state) else None
        if type(step) is int and step >= 0:
            found.partial["counters"] = f"trainer_state.json has global_step {step} and no policy version"
            found.partial["data_position"] = f"a resume skips {step} batches: no skip set, no dataset fingerprint"
        else:
            found.corrupt["counters"] = fault(state) or f"trainer_state.json: global_step={short(step)}: no step"
    _tokenizer(path, found)
    if (path / "generation_config.json").exists():
        found.partial["decoding"] = "generation_config.json holds the model's defaults, not what the run drew with"
    if (path / "training_args.bin").exists():
        found.partial["layout"] = "training_args.bin is a pickle and is not read"
    tag = _zero_folder(path)
    if tag is not None:
        _zero_shards(tag, found)
    folders = {entry.name for entry in path.iterdir() if entry.is_dir()}
    unread = sorted(folders - {*_FSDP_FOLDERS.values()} - ({tag.name} if tag else set()))
    if unread:
        found.notes.append(f"folders are not read: {', '.join(unread)}")
    return found


def _zero_folder(path: Path) -> Path | None:
    """The folder of DeepSpeed's shards that `latest` names."""
    latest = path / "latest"
    name = "" if fault(latest, container=False) else latest.read_bytes()[:200].decode("utf-8", "replace").strip()
    return path / name if re.fullmatch(r"[A-Za-z0-9_.-]*[A-Za-z0-9]", name) else None


def _zero_shards(folder: Path, found: Found) -> None:
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    shards = [shard for shard in map(_ZERO_SHARD.fullmatch, names) if shard]
    for kind, component in (("model", "policy"), ("optim", "optimizer")):
        mine = [shard for shard in shards if shard[3] == kind]
        ranks = {int(shard[1] or 0) for shard in mine}
        found.add(component, [folder / shard[0] for shard in mine])
        if not mine and component not in found.present:
            found.corrupt[component] = f"{folder.name}: holds no *_{kind}_states.pt"
        elif mine and len(ranks) <= max(ranks):
            found.corrupt[component] = f"{folder.name}: {len(ranks)} of at least {max(ranks) + 1} ranks have a file"
    found.notes.append(f"{folder.name}: DeepSpeed's files by rank, whose number is recorded nowhere outside of pickles")


def _fsdp_folders(path: Path, found: Found) -> None:
    for component, name in _FSDP_FOLDERS.items():
        if (path / name).is_dir():
            inner = _torch_dcp(path / name)
            if component in inner.present:
                found.present.add(component)
            else:
                damage = next(iter(inner.corrupt.values()), f"holds no {component}")
                found.corrupt[component] = f"{name}: {damage}"


def _indexed(path: Path, found: Found) -> list[Path]:
    """The weight files that an index names; a fault of the index is a fault of the policy."""
    for index in (path / name for name in _INDEXES):
        if not index.exists():
            continue
        named = read_json(index).get("weight_map") if not fault(index) else None
        if not isinstance(named, dict) or not named or not all(type(name) is str for name in named.values()):
            found.corrupt["policy"] = fault(index) or f"{index.name}: weight_map={short(named)}: names no files"
            return []
        outside = [name for name in named.values() if Path(name).name != name or name in ("", ".", "..")]
        if outside:
            found.corrupt["policy"] = f"{index.name}: {short(outside[0])} leads out of the checkpoint; refused"
            return []
        return [path / name for name in sorted(set(named.values()))]
    return []


def _verl(path: Path) -> Found:
    found = _files_by_rank(path, "actor")
    shards = path / "actor" / "dist_ckpt"
    if shards.is_dir() and any(shards.iterdir()):
        unread = "actor/dist_ckpt holds Megatron's shards, which are not read"
        found.partial |= dict.fromkeys(("policy", "optimizer", "scheduler", "rng"), unread)
    return found


def _skyrl(path: Path) -> Found:
    found = _files_by_rank(path, "policy")
    if (path / "trainer_state.pt").exists():
        found.partial["counters"] = "trainer_state.pt is a pickle and is not read; no policy version"
    return found


def _files_by_rank(path: Path, folder: str) -> Found:
    """verl's files, three a rank; SkyRL has them under another name of the folder."""
    found = Found()
    actor = path / folder
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
    if (path / "critic").exists():
        found.notes.append("critic is not read")
    return found


def _torch_dcp(path: Path) -> Found:
    """The index says what was saved; a shard that it names and that is not whole may hold any part of it."""
    if not any(path.glob(f"*{dcp.SUFFIX}")) and not (path / dcp.INDEX).exists():
        return _dcp_safetensors(path)
    found, index_path = Found(), path / dcp.INDEX
    if damage := fault(index_path, container=False):
        because = ": DCP writes it last, so that the save never came to its end" if damage.endswith("missing") else ""
        return Found(corrupt={"policy": damage + because})
    try:
        index = dcp.read_index(index_path)
    except ValueError as error:
        return Found(corrupt={"policy": str(error)})
    files = [path / name for name in index.files]
    damage = "" if files else f"{dcp.INDEX}: names no file of shards"
    for component, keys in index.parts().items():
        if damage:
            found.corrupt[component] = damage
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


#: A reader of each foreign layout.
LAYOUTS: dict[str, Callable[[Path], Found]] = {
    "transformers": _transformers,
    "verl": _verl,
    "SkyRL": _skyrl,
    "torch DCP": _torch_dcp,
}
