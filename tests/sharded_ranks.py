"""Real ranks for the tests: processes forked from a server that has torch loaded, one thread each, gloo."""

import multiprocessing
import os
import traceback

import numpy as np
import torch

from rlinfra_utils.policy import Trainer, tiny_llama
from rlinfra_utils.rollouts import Decoding, Rollout
from rlinfra_utils.sharded import init_group, shard_model

CONTEXT = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
CONTEXT.set_forkserver_preload(["rlinfra_utils.policy", "rlinfra_utils.sharded"])
TIMEOUT_S = 240


def _rank(work, rank, world_size, rendezvous, pipe, args):
    torch.set_num_threads(1)
    try:
        with init_group(rank, world_size, rendezvous, timeout_s=TIMEOUT_S) as ranks:
            pipe.send((True, work(ranks, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def start(world_size, work, folder, *args):
    """Processes of `work(ranks, *args)`, a module's function, and the pipe that each answers into."""
    rendezvous = f"file://{folder}/rendezvous-{os.urandom(4).hex()}"
    started = []
    for rank in range(world_size):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_rank, args=(work, rank, world_size, rendezvous, theirs, args))
        process.start()
        theirs.close()
        started.append((process, mine))
    return started


def run(world_size, work, folder, *args):
    """What `work(ranks, *args)` returned on each rank."""
    started = start(world_size, work, folder, *args)
    answers = [pipe.recv() if pipe.poll(TIMEOUT_S) else (False, "no answer") for _, pipe in started]
    for process, _ in started:
        process.join(30)
        process.kill()
    for rank, (done, answer) in enumerate(answers):
        assert done, f"rank {rank}: {answer}"
    return [answer for _, answer in answers]


def records(num_rollouts, seed=0, **changes):
    """Rollouts of random tokens and of lengths from 1 to 12, so that shares of a batch differ in tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(num_rollouts):
        num_prompt, num_response = rng.integers(2, 6), rng.integers(1, 13)
        values = {
            "sample_id": f"s{number}",
            "prompt_tokens": rng.integers(3, 17, num_prompt).tolist(),
            "response_tokens": rng.integers(3, 17, num_response).tolist(),
            "policy_mask": [0] * int(num_prompt) + [1] * int(num_response),
            "behavior_logprobs": rng.uniform(-3.4, -2.3, num_response).tolist(),
            "decoding": Decoding(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed"),
        }
        made.append(Rollout(**(values | changes)))
    return made, rng.normal(size=num_rollouts).tolist()


def trainer_on(ranks, seed=0, **options):
    """A trainer over the sharded tiny policy."""
    model = shard_model(tiny_llama(seed), ranks)
    return Trainer(model, ranks=ranks, **options)


def arrays(tensors):
    """Tensors by name as arrays that own their bytes."""
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
