"""From a stack's own record to the fields of `rollouts.Rollout`: one function a stack, and nothing made up.

Models: where each stack keeps tokens, masks, log-probs, versions, rewards and names, at the commits of `stacks.json`;
padding is cut by the stack's own mask, never by token values. Leaves out everything that a record does not hold.
Use: `ADAPTERS["verl"].read(Reader(...))` gives a `Draft`; `to_rollout` is the door.

Three rules. A version read when a group was opened bounds the version of its tokens and is not it. Log-probs that the
trainer recomputed are not the behaviour policy's. A loss mask says what is trained on, not who wrote the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlinfra_utils.doors import short
from rlinfra_utils.stacks.draft import Adapter, Draft
from rlinfra_utils.stacks.reader import Reader
from rlinfra_utils.stacks.tokens import behaviour, keep, last, spans, split, unsplit


def _trl_sync(p: Reader) -> Draft:
    prompt = p.ints("prompt_ids", required=True)
    prompt = keep(prompt, p.bits("prompt_mask", len(prompt), required=True))
    response = p.ints("completion_ids", required=True)
    size = len(response)
    mask, tools = p.bits("completion_mask", size, required=True), p.bits("tool_mask", size)
    logprobs, recomputed = p.floats("sampling_per_token_logps", size), p.floats("old_per_token_logps", size)
    if 1 in mask:  # all zero: a truncated answer masked whole, where the padding cannot be told
        size = size - mask[::-1].index(1)
        response, mask = response[:size], mask[:size]
        logprobs, tools = (values and values[:size] for values in (logprobs, tools))
    if tools:
        mask = [a & b for a, b in zip(mask, tools, strict=True)]
    draft = Draft(
        {**split(prompt, response, mask, by_author=bool(tools)), "behavior_logprobs": behaviour(logprobs, mask)}
    )
    if recomputed is not None:
        draft.found["behavior_logprobs"] = "old_per_token_logps, which the trainer recomputed after sampling"
    if (advantage := p.number("advantages")) is not None:
        draft.extra["advantages"] = advantage
        draft.found["reward"] = "the advantage (extra.advantages), from which no reward follows"
    return draft


def _trl_async(p: Reader) -> Draft:
    tokens = p.ints("input_ids", required=True)
    mask = p.bits("completion_mask", len(tokens), required=True)
    fields = unsplit(tokens, mask, by_author=False)
    response = fields["response_tokens"]
    logprobs = last(p.floats("old_log_probs", len(tokens)), response)
    fields["behavior_logprobs"] = behaviour(logprobs, last(mask, response))
    if (group := p.integer("group_id")) is not None:
        fields["group_id"] = str(group)
    if (reward := p.number("metrics.reward")) is not None:
        fields["reward"] = {"reward": reward}
    draft = Draft(fields, extra={"advantage": p.number("advantage")})
    if (version := p.integer("model_version")) is not None:
        draft.bounded_below("model_version", version, "read when the group was opened")
    return draft


def _verl(p: Reader) -> Draft:
    prompt = p.ints("batch.prompts", required=True)
    response = p.ints("batch.responses", required=True)
    attended = p.bits("batch.attention_mask", len(prompt) + len(response), required=True)
    ours = last(attended, response)
    mask = keep(p.bits("batch.response_mask", len(response)), ours)
    logprobs = keep(p.floats("batch.rollout_log_probs", len(response)), ours)
    rewards = p.total("batch.rm_scores", len(response))
    prompt = keep(prompt, attended[: len(prompt)])
    fields = split(prompt, keep(response, ours), mask, by_author=True)
    fields["behavior_logprobs"] = behaviour(logprobs, mask)
    fields["group_id"] = p.text("non_tensor_batch.uid")
    fields["reward"] = None if rewards is None else {"rm_scores": rewards}
    draft = Draft(fields)
    least, most = (p.integer(f"non_tensor_batch.{end}_global_steps") for end in ("min", "max"))
    draft.versions = (least, most)
    draft.extra |= {"min_global_steps": least, "max_global_steps": most}
    if least is not None and least == most:
        fields["policy_version"] = least
    elif least is not None or most is not None:
        draft.found["policy_version"] = (
            f"from {least} to {most} (min_ and max_global_steps), with no token where it moved"
        )
    return draft


def _openrlhf(p: Reader) -> Draft:
    tokens = p.ints("sequences", required=True)
    attended = p.bits("attention_mask", len(tokens), required=True)
    # Action axes are one short: entry i is about token i + 1, since nothing predicts the first token.
    mask = keep([0, *p.bits("action_mask", len(tokens) - 1, required=True)], attended)
    logprobs = p.floats("rollout_log_probs", len(tokens) - 1)
    fields = unsplit(keep(tokens, attended), mask, by_author=True)
    response = fields["response_tokens"]
    logprobs = None if logprobs is None else last(keep([None, *logprobs], attended), response)
    fields["behavior_logprobs"] = behaviour(logprobs, last(mask, response))
    fields["truncated"] = p.flag("truncated")
    if (reward := p.number("rewards")) is not None:
        fields["reward"] = {"rewards": reward}
    draft = Draft(fields, extra={"scores": p.number("scores")})
    if fields["truncated"] is not None:
        draft.found["stop_reason"] = "truncated, which is true for the length limit and false for all else"
    if fields["behavior_logprobs"] is None and p.floats("action_log_probs") is not None:
        draft.found["behavior_logprobs"] = "action_log_probs, which the current actor recomputed after sampling"
    return draft


def _nemo_rl(p: Reader) -> Draft:
    tokens = p.ints("fields.input_ids", required=True)
    mask = p.bits("fields.token_mask", len(tokens), required=True)
    length = p.integer("fields.input_lengths", required=True)
    if not 0 <= length <= len(tokens):
        raise ValueError(f"fields.input_lengths: {length} is outside 0..{len(tokens)}; send the row's own length")
    logprobs = p.floats("fields.generation_logprobs", len(tokens))
    fields = unsplit(tokens[:length], mask[:length], by_author=True)
    response = fields["response_tokens"]
    logprobs = None if logprobs is None else last(logprobs[:length], response)
    fields["behavior_logprobs"] = behaviour(logprobs, last(mask[:length], response))
    fields["sample_id"] = p.text("sample_ids")
    if fields["sample_id"] is not None and "_g" in fields["sample_id"]:  # the stack's form is {group}_g{i}
        fields["group_id"] = fields["sample_id"].rpartition("_g")[0]
    if (reward := p.number("fields.total_reward")) is not None:
        fields["reward"] = {"total_reward": reward}
    draft = Draft(fields)
    tag = p.get("tags")
    if (version := Reader(p.stack, {"tags": tag}, 0, None).integer("tags.weight_version")) is not None:
        draft.bounded_below("weight_version", version, "of the weights at the start of the group")
    return draft


def _prime_rl(p: Reader) -> Draft:
    tokens = p.ints("token_ids", required=True)
    mask = p.bits("mask", len(tokens), required=True)
    fields = unsplit(tokens, mask, by_author=False)
    response = fields["response_tokens"]
    fields["behavior_logprobs"] = behaviour(last(p.floats("logprobs", len(tokens)), response), last(mask, response))
    draft = Draft(fields, extra={"env_name": p.text("env_name")})
    if p.floats("advantages", len(tokens)) is not None:
        draft.found["reward"] = "an advantage for each token, from which no reward follows"
    if p.floats("temperatures"):  # empty until the stack's sink fills it
        used = sorted(set(keep(p.floats("temperatures", len(tokens)), mask)), key=str)
        draft.extra["temperatures"] = used
        draft.found["decoding"] = f"the temperature alone ({', '.join(map(str, used))}), from the configuration"
        draft.temperature = used[0] if len(used) == 1 else None
    return draft


def _skyrl(p: Reader) -> Draft:
    prompt = p.ints("generator_output.prompt_token_ids", required=True)
    response = p.ints("generator_output.response_ids", required=True)
    mask = p.bits("generator_output.loss_masks", len(response))
    fields = split(prompt, response, mask, by_author=False)
    fields["behavior_logprobs"] = behaviour(p.floats("generator_output.rollout_logprobs", len(response)), mask)
    fields["stop_reason"] = p.text("generator_output.stop_reasons")
    rewards = p.get("generator_output.rewards")
    if isinstance(rewards, list):
        rewards = p.total("generator_output.rewards", len(response))
    elif rewards is not None:
        rewards = p.number("generator_output.rewards")
    fields["reward"] = None if rewards is None else {"rewards": rewards}
    whole = Reader(p.stack, p.payload, 0, None)  # the group's own fields have no row
    fields["prompt_id"] = whole.text("uid")
    draft = Draft(fields)
    if (trajectory := p.get("generator_output.trajectory_ids")) is not None:
        draft.extra["trajectory_ids"] = trajectory
        draft.found["sample_id"] = "trajectory_ids (extra), which come again in each epoch"
    if (step := whole.integer("global_step_when_scheduled")) is not None:
        draft.extra["global_step_when_scheduled"] = step
        draft.found["policy_version"] = (
            f"global_step_when_scheduled {step}: a trainer step, not a version of the weights"
        )
    if fields["prompt_id"] is not None:
        draft.found["group_id"] = "uid, the prompt's place in the data set, which comes again in each epoch"
    return draft


def _areal(p: Reader) -> Draft:
    tokens = p.ints("input_ids", required=True)
    attended = p.bits("attention_mask", len(tokens), required=True)
    mask = keep(p.bits("loss_mask", len(tokens), required=True), attended)
    logprobs = keep(p.floats("logprobs", len(tokens)), attended)
    versions = keep(p.ints("versions", len(tokens)), attended)
    fields = unsplit(keep(tokens, attended), mask, by_author=False)
    response = fields["response_tokens"]
    fields["behavior_logprobs"] = behaviour(last(logprobs, response), last(mask, response))
    if (reward := p.number("rewards")) is not None:
        fields["reward"] = {"rewards": reward}
    draft = Draft(fields)
    if versions is not None and 1 in mask:
        fields |= spans(last(versions, response), last(mask, response))
        sampled = keep(versions, mask)
        draft.versions = (min(sampled), max(sampled))
    return draft


#: Kind of record -> its adapter. The record is the last one before the trainer's own tensors.
ADAPTERS: Mapping[str, Adapter] = {
    "TRL sync": Adapter(
        "the dict that GRPOTrainer._generate_and_score_completions returns",
        _trl_sync,
        "completion_ids",
        ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"),
    ),
    "TRL async": Adapter("RolloutSample: its fields by name", _trl_async, None, ("input_ids", "completion_mask")),
    "verl": Adapter(
        "DataProto: {'batch': dict(p.batch.items()), 'non_tensor_batch': p.non_tensor_batch}",
        _verl,
        "batch.responses",
        ("batch.prompts", "batch.responses", "batch.attention_mask"),
    ),
    "OpenRLHF": Adapter(
        "Experience: vars(experience)", _openrlhf, "sequences", ("sequences", "attention_mask", "action_mask")
    ),
    "NeMo RL": Adapter(
        "pack_payload: {'sample_ids': ..., 'fields': the batch of record_to_train_batch, 'tags': ...}",
        _nemo_rl,
        "fields.input_ids",
        ("fields.input_ids", "fields.input_lengths", "fields.token_mask"),
    ),
    "PRIME-RL": Adapter("TrainingSample: msgspec.structs.asdict(sample)", _prime_rl, None, ("token_ids", "mask")),
    "SkyRL": Adapter(
        "GeneratedOutputGroup: vars(group); a GeneratorOutput alone: {'generator_output': output}",
        _skyrl,
        "generator_output.response_ids",
        ("generator_output.prompt_token_ids", "generator_output.response_ids"),
    ),
    "AReaL": Adapter(
        "the dict that a workflow's arun_episode returns",
        _areal,
        "input_ids",
        ("input_ids", "attention_mask", "loss_mask"),
    ),
}


def adapter_of(stack: str) -> Adapter:
    """The adapter of a kind of record. Raises ValueError, naming the kinds, for another one."""
    if not isinstance(stack, str) or stack not in ADAPTERS:
        raise ValueError(f"stack={short(stack)}: the records known are {', '.join(ADAPTERS)}")
    return ADAPTERS[stack]
