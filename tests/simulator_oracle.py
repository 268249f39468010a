"""An independent model of the loop in SimPy, for tests and the benchmark, written as SimPy's guide has it.

Models rollouts as processes that request a slot, pass their stages, and request a verifier; groups as AllOf; a queue
with a limit; a trainer that takes whole batches; versions that come at once. Leaves out all else. It draws nothing:
it is given what each rollout needs. Use: `SimpyLoop(config, stages_s, verify_s, tokens, max_queued=128).run()`.
"""

import simpy


class SimpyLoop:
    """`rows` (by rollout index) and `steps` are what happened; `config` gives the sizes."""

    def __init__(self, config, stages_s, verify_s, tokens, max_queued=float("inf")):
        self.config, self.stages_s, self.verify_s, self.tokens = config, stages_s, verify_s, tokens
        self.max_queued = max_queued
        self.env = simpy.Environment()
        self.slots = simpy.Resource(self.env, config.num_slots)
        self.verifiers = simpy.Resource(self.env, config.num_verifiers)
        self.queue = simpy.Store(self.env)
        self.changed = self.env.event()
        self.version, self.num_queued = 0, 0
        self.rows, self.steps = {}, []

    def run(self):
        self.env.process(self.dispatcher())
        self.env.run(self.env.process(self.trainer()))
        return self

    def tell(self):
        changed, self.changed = self.changed, self.env.event()
        changed.succeed()

    def dispatcher(self):
        first = 0
        while True:
            while self.slots.count + len(self.slots.queue) >= self.slots.capacity or self.num_queued >= self.max_queued:
                yield self.changed
            members = range(first, first + self.config.group_size)
            self.env.process(self.group(members, [self.env.process(self.rollout(index)) for index in members]))
            first += self.config.group_size
            yield self.env.timeout(0)  # so that the members' requests are made

    def rollout(self, index):
        row = self.rows[index] = {}
        with self.slots.request() as slot:
            yield slot
            row["start_s"], row["start_version"] = self.env.now, self.version
            for stage_s in self.stages_s[index]:
                yield self.env.timeout(stage_s)
        row["end_s"], row["end_version"] = self.env.now, self.version
        self.tell()
        with self.verifiers.request() as verifier:
            yield verifier
            row["verify_start_s"] = self.env.now
            yield self.env.timeout(self.verify_s[index])
        row["verified_s"] = self.env.now

    def group(self, members, processes):
        yield simpy.AllOf(self.env, processes)
        self.num_queued += len(members)
        for index in members:
            self.rows[index]["ready_s"] = self.env.now
        yield self.queue.put(members)

    def trainer(self):
        config = self.config
        while len(self.steps) < config.num_steps:
            groups = []
            while len(groups) * config.group_size < config.batch_rollouts:
                groups.append((yield self.queue.get()))
            batch = [index for members in groups for index in members]
            self.num_queued -= len(batch)
            self.tell()
            for index in batch:
                self.rows[index].update(taken_s=self.env.now, taken_version=self.version, taken_step=len(self.steps))
            taken_s, tokens = self.env.now, sum(self.tokens[index] for index in batch)
            read = tokens + len(batch) * config.prompt_tokens
            yield self.env.timeout(config.train_s.mean + config.train_s_per_token * read)
            self.steps.append((taken_s, self.env.now, len(batch), tokens))
            if len(self.steps) % config.sync_interval == 0:
                self.version += 1
