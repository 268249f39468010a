"""The sequential loop over the real tiny policy: records, chain, stages, refusals, and that it learns."""

import json
from dataclasses import replace

import pytest
import torch

from rlinfra_utils import policy, rollouts
from rlinfra_utils.engines import HFEngine
from rlinfra_utils.timers import Trace

STAGES = [
    *("prepare", "prefill", "decode", "verifier", "records", "logprob_recompute"),
    *("forward_backward", "optimizer_step", "weight_sync", "records"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors too small to share out: on a busy machine threads that wait for one another cost many times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_loop(engine_class=HFEngine, **settings):
    model, tokenizer = policy.load_warm_start()
    engine = engine_class(policy.load_warm_start()[0], tokenizer)
    settings = {"prompts_per_step": 3, "group_size": 4, **settings}
    return policy.SequentialLoop(engine, policy.Trainer(model), tokenizer, Trace(), **settings)


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal_weights(left, right):
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    loop = make_loop(folder=tmp_path_factory.mktemp("loop"), run_id="run42")
    return loop, [loop.step() for _ in range(3)]


def test_every_record_is_accepted_and_chained_from_prompt_to_weights(three_steps):
    loop, results = three_steps
    for step, result in enumerate(results):
        assert len(result.records) == 12
        for index, record in enumerate(result.records):
            assert rollouts.validate(record, current_version=step, max_lag=0).status == "accept"
            assert record.sample_id == f"run42-s{step:04d}-p{index // 4:03d}-g{index % 4:02d}"
            assert record.group_id == f"run42-s{step:04d}-p{index // 4:03d}"
            assert record.policy_version == step
            assert record.training_batch_id == f"run42-b{step:04d}"
            assert record.optimizer_step == record.resulting_policy_version == step + 1
    ids = [record.sample_id for result in results for record in result.records]
    assert len(set(ids)) == 36
    assert loop.engine.version == loop.trainer.version == 3


def test_a_record_tells_its_own_story(three_steps):
    """Each reward follows from the tokens and the prompt's name alone."""
    loop, results = three_steps
    for result in results:
        for record in result.records:
            left, right = map(int, record.prompt_id.removeprefix("add-").split("+"))
            assert loop.tokenizer.decode(record.prompt_tokens) == f"<bos>{left}+{right}="
            tokens = record.response_tokens
            ended = tokens[-1] == loop.tokenizer.eos_token_id
            text = loop.tokenizer.decode(tokens[:-1] if ended else tokens)
            assert record.stop_reason == ("eos" if ended else "length")
            assert record.truncated is not ended
            assert record.reward["correctness"] == float(ended and text.strip(" ").lstrip("0") == str(left + right))
        assert result.correctness == pytest.approx(sum(r.reward["correctness"] for r in result.records) / 12)
        assert result.format == pytest.approx(sum(r.reward["format"] for r in result.records) / 12)
        assert result.num_new_tokens == result.update.num_tokens == sum(len(r.response_tokens) for r in result.records)


def test_trained_records_are_on_disk_as_they_were_returned(three_steps):
    loop, results = three_steps
    for step, result in enumerate(results):
        table = rollouts.read(loop.folder / "trained" / f"run42-b{step:04d}.parquet")
        assert rollouts.from_table(table) == result.records


def test_the_trace_holds_the_stages_in_order_and_they_fill_the_step(three_steps):
    loop, results = three_steps
    spans = loop.trace.frame()
    steps = spans[spans["stage"] == "step"]
    for result, (_, step) in zip(results, steps.iterrows()):
        inside = spans[spans["parent"] == step["span"]].sort_values("start_s")
        assert inside["stage"].tolist() == STAGES
        assert (inside["start_s"].to_numpy()[1:] >= inside["end_s"].to_numpy()[:-1]).all()
        assert inside["dur_s"].sum() + step["self_s"] == pytest.approx(step["dur_s"])
        assert step["dur_s"] <= result.wall_s
        tokens = inside.set_index("stage")["tokens"]
        assert tokens["decode"] == result.num_new_tokens
        assert tokens["prefill"] == result.num_prompt_tokens


def test_the_engine_ends_with_the_trainers_weights_and_new_log_probs_agree(three_steps):
    loop, results = three_steps
    assert equal_weights(weights_of(loop.engine.model), weights_of(loop.trainer.model))
    assert not equal_weights(weights_of(loop.trainer.model), weights_of(policy.load_warm_start()[0]))
    assert max(result.update.gap for result in results) < 1e-5


def test_a_seed_repeats_a_run_and_another_one_does_not():
    timeless = {"started_s": None, "finished_s": None}
    runs = []
    for seed in (5, 5, 6):
        loop = make_loop(seed=seed)
        records = [record.model_copy(update=timeless) for _ in range(2) for record in loop.step().records]
        runs.append((records, weights_of(loop.trainer.model)))
    assert runs[0][0] == runs[1][0]
    assert equal_weights(runs[0][1], runs[1][1])
    assert [r.prompt_id for r in runs[0][0]] != [r.prompt_id for r in runs[2][0]]


class StaleEngine(HFEngine):
    """Keeps its first weights: it takes a version's name and not the version."""

    def adopt(self, model, version):
        pass


class RetokenisingEngine(HFEngine):
    """Reads another prompt than it was sent."""

    def generate(self, prompt_ids, *args, **kwargs):
        return super().generate([prompt[1:] for prompt in prompt_ids], *args, **kwargs)


class AbortingEngine(HFEngine):
    """Gives every request up after it has answered."""

    def generate(self, *args, **kwargs):
        generation = super().generate(*args, **kwargs)
        completions = [replace(completion, stop_reason="abort") for completion in generation.completions]
        return replace(generation, completions=completions)


@pytest.mark.parametrize(
    ("engine_class", "good_steps", "code"),
    [(StaleEngine, 1, "stale"), (RetokenisingEngine, 0, "prompt_mismatch"), (AbortingEngine, 0, "not_finished")],
)
def test_a_batch_that_the_contract_refuses_is_kept_and_not_trained_on(tmp_path, engine_class, good_steps, code):
    loop = make_loop(engine_class, folder=tmp_path)
    for _ in range(good_steps):
        loop.step()
    weights = weights_of(loop.trainer.model)
    with pytest.raises(ValueError, match=r"records: 12 of 12 not accepted, batch refused; run0-s000\d-p000-g00 first"):
        loop.step()
    assert equal_weights(weights_of(loop.trainer.model), weights)
    assert loop.trainer.version == good_steps
    [part] = (tmp_path / "reject").iterdir()
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    assert len(lines) == 12
    assert all(line["findings"][0]["code"] == code for line in lines)
    assert {line["record"]["training_batch_id"] for line in lines} == {None}
    if engine_class is AbortingEngine:
        assert {tuple(line["record"]["reward"].values()) for line in lines} == {(0.0, 0.0)}


def test_without_a_folder_a_refusal_still_says_why():
    with pytest.raises(ValueError, match=r"reject, .*prompt"):
        make_loop(RetokenisingEngine).step()


def test_long_answers_are_cut_off_and_earn_nothing():
    decoding = policy.DECODING.model_copy(update={"max_new_tokens": 30, "ignore_eos": True})
    result = make_loop(decoding=decoding).step()
    assert result.num_new_tokens == 12 * 30
    assert {(r.stop_reason, r.truncated) for r in result.records} == {("length", True)}
    assert (result.correctness, result.format) == (0.0, 0.0)
    assert result.num_degenerate_groups == 3
    assert result.update.loss == 0.0


def test_more_digits_make_longer_prompts_and_many_epochs_more_optimizer_steps():
    decoding = policy.DECODING.model_copy(update={"max_new_tokens": 22})
    result = make_loop(digits=20, decoding=decoding, num_epochs=3, minibatches=2).step()
    assert result.num_prompt_tokens == 3 * (1 + 20 + 1 + 20 + 1)
    assert result.update.optimizer_step == 6
    assert result.update.version == 1


def test_a_slow_verifier_shows_in_its_stage():
    loop = make_loop(verifier_s=0.2)
    loop.step()
    assert loop.trace.summary().loc["verifier", "total_s"] >= 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verifier_s": -1.0}, "verifier_s=-1.0"),
        ({"verifier_s": float("nan")}, "verifier_s=nan"),
        ({"verifier_s": float("inf")}, "verifier_s=inf"),
        ({"group_size": 1}, "group_size=1"),
        ({"prompts_per_step": 0}, "num=0"),
        ({"digits": 0}, "digits=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_senseless_setting_is_refused_at_the_door(settings, message):
    with pytest.raises(ValueError, match=message):
        make_loop(**settings)


def test_a_restored_trainer_goes_on_where_it_was():
    whole = make_loop(seed=3)
    steps = [whole.step() for _ in range(3)]
    first = make_loop(seed=3)
    for _ in range(2):
        first.step()
    trainer = policy.Trainer(first.trainer.model, version=2)
    trainer.optimizer.load_state_dict(first.trainer.optimizer.state_dict())
    resumed = policy.SequentialLoop(
        first.engine, trainer, first.tokenizer, Trace(), prompts_per_step=3, group_size=4, seed=3
    )
    result = resumed.step()
    assert [r.sample_id for r in result.records] == [r.sample_id for r in steps[2].records]
    assert [r.response_tokens for r in result.records] == [r.response_tokens for r in steps[2].records]
    assert equal_weights(weights_of(trainer.model), weights_of(whole.trainer.model))


def test_an_engine_of_another_version_is_refused():
    model, tokenizer = policy.load_warm_start()
    with pytest.raises(ValueError, match=r"engine\.version=3, trainer\.version=0: publish first"):
        policy.SequentialLoop(HFEngine(model, tokenizer, version=3), policy.Trainer(model), tokenizer, Trace())


def test_filtered_decoding_is_refused_before_anything_is_trained():
    loop = make_loop(decoding=policy.DECODING.model_copy(update={"top_p": 0.9}))
    weights = weights_of(loop.trainer.model)
    with pytest.raises(ValueError, match="no filter"):
        loop.step()
    assert equal_weights(weights_of(loop.trainer.model), weights)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([7, 5, 2], "42"),
        ([7, 5], "42"),
        ([7, 5, 2, 2], "42<eos>"),
        ([2], ""),
        ([], ""),
        ([7, 0, 5, 2], "4<pad>2"),
        ([1, 7, 5, 2], "<bos>42"),
        ([16, 7, 5, 16, 2], " 42 "),
    ],
)
def test_only_the_last_end_token_is_hidden_from_the_verifier(tokens, text):
    assert policy.answer_text(tokens, policy.make_tokenizer()) == text


@pytest.mark.slow
def test_the_policy_learns_from_under_06_to_over_09():
    """With the loop's defaults; bounded in updates."""
    loop = make_loop(prompts_per_step=32, group_size=8)

    def correctness():
        return policy.evaluate(loop.engine, loop.tokenizer, num_prompts=1000, seed=2_000_000)["correctness"]

    assert 0.3 <= correctness() <= 0.6
    for _ in range(80):
        loop.step()
    assert correctness() >= 0.9
