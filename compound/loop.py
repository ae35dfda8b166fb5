"""The optimization loop: schedule, propose, decide; every step an event, every event a checkpoint.

A sweep is one or more jobs in a row, each improving the working configuration on train examples. A
decision then compares it with the best one on validation examples and accepts it at a level that sums
to ``alpha`` over all planned decisions. The test split is read once, at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compound.allowance import Allowance, allowance, caps, dearest, requests_of, runs_left, within
from compound.bounds import Amount
from compound.budget import Meter
from compound.configuration import Configuration
from compound.contracts import Example
from compound.errors import BudgetExhausted
from compound.evaluation import Evaluation, evaluate, gain_interval
from compound.executor import Executor
from compound.optimization import Bench, Job, Progress, Proposal, Task, Tried
from compound.planning import Plan, fewest_of, job_minibatch, make_plan, stochastic, usable
from compound.problem import Problem
from compound.proposals import Proposals, described, since
from compound.recorder import MEMORY_FOLDER, Recorder
from compound.scoring import JobScorer
from compound.statistics import paired_test
from compound.streams import generator, stream
from compound.system import System

__all__ = ["Loop", "Problem", "final_configuration"]

PATIENCE = 3  # sweeps without a proposal before the search ends
TEST_SAMPLES = 1_000_000  # sample indices from here on belong to the test split alone


class Loop:
    """One optimization run. `run` goes from wherever the recorder's state says to the end."""

    def __init__(self, problem: Problem, recorder: Recorder) -> None:
        self.problem = problem
        self.recorder = recorder
        self.state = recorder.state
        budget = problem.settings.budget
        self.meter = Meter(budget.search(), whole=budget.total(), rest="the rest is kept for the test split")
        self.test_meter = Meter(budget.test(), whole=budget.total(), rest="the rest is for the search")
        self.test_meter.pause()  # its minutes begin with the test
        self.executor = Executor(
            problem.engines,
            cache=recorder.cache,
            meter=self.meter,
            seed=problem.settings.seed,
            on_call=recorder.called,
            on_notice=recorder.noticed,
            folder=recorder.run.path / MEMORY_FOLDER,
        )
        recorder.watch(self.meter, self.test_meter)
        self.proposals = Proposals(self.meter, give_up=problem.settings.max_proposal_failures)
        if "proposals" in self.state:
            self.proposals.restore(self.state["proposals"])

    @functools.cached_property
    def _allowance(self) -> Allowance:
        """What the jobs of the run may ask for, by the plan."""
        plan = Plan(**self.state["plan"])
        free = math.inf if self.state["free"] is None else self.state["free"]
        return allowance(self.problem, free, plan.decisions, lms=self._own_lm())

    @functools.cached_property
    def _each(self) -> Amount:
        """The most that one request for a proposal takes; only a limit on calls, tokens or cost needs it."""
        limited = caps(self.meter.budget, self.meter.usage, self.proposals.usage)
        requests = [request for allowed in self._allowance.jobs for request in allowed.requests]
        return dearest(requests, self.executor.engine, self._own_lm()) if limited else Amount(calls=1)

    def _own_lm(self) -> tuple[str, ...]:
        lm = self.problem.system.defaults.get("lm")
        return (lm,) if lm else ()

    def _runs_left(self) -> float:
        """Return the system runs that the budget still holds, besides the requests for proposals to come."""
        return runs_left(self.meter, self.proposals, self._each)

    async def run(self) -> None:
        """Baseline, sweeps and decisions, test."""
        state = self.state
        try:
            if "before" not in state:
                await self._baseline()
            if self.proposals.news:  # of the job that was interrupted, or has just ended
                self._tell_news(len(state["history"]) - (state["optimizer"] is None))
            while (
                not state["stopped"] or state["job"] or state["working"]
            ):  # a job's change is owed a decision
                await self._sweep()
                await self._decide()
            self.meter.pause()
            if "test_after" not in state:
                self.test_meter.proceed()
                await self._test()
            self.test_meter.pause()
        finally:
            await self.executor.aclose()

    async def _baseline(self) -> None:
        """Measure the starting configuration on the validation split."""
        self._announce()
        start = self.problem.system
        evaluation = await self._evaluate(start, self.problem.valid, self._samples(0))
        method = self.problem.method
        jobs = len(method.jobs) if method.jobs_each is None else method.jobs_each
        plan = self._planned(jobs)
        self.state.update(
            best=start.configuration.to_json(), before=evaluation.to_json(), incumbent=evaluation.to_json(),
            plan=plan.__dict__, decision=0, idle=0, job=0, working={}, optimizer=None, current=None,
            scored=[], spent=0.0, history=[], tried=[], stopped="", proposals=self.proposals.to_json(),
        )  # fmt: skip
        self.recorder.event("baseline", split="valid", plan=plan.__dict__, **evaluation.summary())

    def _announce(self) -> None:
        """Record what is known before anything is run: each line once, in however many attempts."""
        notes: list[tuple[str, Mapping[str, Any]]] = [
            ("note", {"note": n}) for n in self.problem.method.notes
        ]
        notes += [("outlook", self.problem.outlook)] if self.problem.outlook else []
        for number in range(self.state.get("announced", 0), len(notes)):
            self.state["announced"] = number + 1
            event, facts = notes[number]
            self.recorder.event(event, **facts)

    def _planned(self, jobs: int) -> Plan:
        """Divide the budget between decisions, jobs, and the requests for proposals that jobs make."""
        left = self.meter.remaining_runs()
        for _ in range(2):  # how many requests there are depends on the runs, and the other way round
            plan = make_plan(self.problem, left, jobs)
            free = max(0.0, left - plan.decisions * plan.cost)
            self.state.update(plan=plan.__dict__, free=free if math.isfinite(free) else None)
            self.__dict__.pop("_allowance", None)
            self.__dict__.pop("_each", None)
            self.proposals.left = self._allowance.calls
            left = self._runs_left()
        return plan

    async def _sweep(self) -> None:
        """Run the jobs of one sweep; each may change the working configuration.

        Before the last decision jobs go on while the rest of the budget holds one and the last round changed
        something: what is left then would serve nobody.
        """
        state, plan = self.state, Plan(**self.state["plan"])
        while not state["stopped"]:
            if state["job"] == plan.jobs:
                if not (more := self._more_jobs(plan)):
                    return
                state["job"] = plan.jobs - more
            least = self._least()
            if state["current"] is None and self._free(plan) < least:
                state["stopped"] = self._too_small(plan, least)
                return
            await self._work(self._job(plan), state["share"])

    def _jobs(self) -> dict[tuple[str, tuple[str, ...]], Job]:
        """Return the method's jobs, by who does what."""
        method = self.problem.method
        jobs = [*([method.opening] if method.opening else []), *method.jobs]
        return {(job.optimizer, job.keys): job for job in jobs}

    def _least(self) -> float:
        """Return the system runs below which no job can do anything."""
        minibatch, tried = self.problem.settings.minibatch, self._tried()
        return min(fewest_of(job, minibatch, tried=tried) for job in self._jobs().values())

    def _limit(self) -> str:
        """Return the name of the limit that system runs are bound by, where there is one alone."""
        limits = self.problem.settings.budget.model_dump(exclude={"test_share"}, exclude_none=True)
        return f"optimize.budget.{next(iter(limits))}" if len(limits) == 1 else "optimize.budget"

    def _too_small(self, plan: Plan, least: float) -> str:
        told = "the rest of the budget is too small for another job"
        if self.state["history"]:
            return told
        return (
            f"{told}: the first needs {least:g} system runs, {self._free(plan):g} are free, and "
            f"{plan.cost:g} are set aside for its decision; raise {self._limit()}"
        )

    def _more_jobs(self, plan: Plan) -> int:
        """Return how many jobs go on before the last decision: there are `iterations` rounds at most."""
        state, settings = self.state, self.problem.settings
        if self.problem.method.jobs_each is not None:
            return 0
        last = state["history"][-plan.jobs :]
        worth = any(record["values"] for record in last) and any(record["runs"] for record in last)
        most = plan.jobs * settings.iterations
        if not worth or plan.decisions - state["decision"] != 1 or len(state["history"]) >= most:
            return 0
        least = self.problem.method.least * settings.minibatch
        return plan.jobs if self._free(plan) >= plan.jobs * least else int(self._free(plan) // least)

    def _job(self, plan: Plan) -> Job:
        """Return the job under way, or choose the next and set its share of the budget."""
        state, method = self.state, self.problem.method
        if state["current"] is None:
            seed = stream(self.problem.settings.seed, "scheduler")
            opening = method.opening if not state["history"] else None
            job = opening or method.scheduler.choose(method.jobs, state["history"], seed)
            limits = caps(self.meter.budget, self.meter.usage, self.proposals.usage)
            state.update(
                current={
                    "optimizer": job.optimizer,
                    "keys": list(job.keys),
                    "reason": dict(job.reason),
                    "caps": limits,
                    "proposals": self.proposals.to_json(),
                },
                spent=self.meter.system_runs,
                share=self._runs_of(plan, job, opening),
            )
        current = state["current"]
        return Job(current["optimizer"], tuple(current["keys"]), current["reason"])

    def _tried(self) -> bool:
        """Return whether any job has compared anything yet."""
        return any(record["runs"] for record in self.state["history"])

    def _runs_of(self, plan: Plan, job: Job, opening: Job | None) -> float:
        """Return the system runs that a job gets; 0 where they would be too few."""
        declared = self._jobs()[job.optimizer, job.keys]
        needed = declared.least(self.problem.settings.minibatch)
        if opening is not None or declared.step is not None:
            share = self._share(plan, job) if opening is None else self._free(plan) * opening.weight
            return share if share >= needed else 0.0
        return usable(self._share(plan, job), self._free(plan), needed, tried=self._tried())

    def _share(self, plan: Plan, job: Job) -> float:
        """Return the job's share by weight of what is left, less the decisions to come."""
        weights = {(j.optimizer, j.keys): j.weight for j in self.problem.method.jobs}
        part = plan.jobs / len(weights)  # of all jobs, that precedes each decision
        done = self.state["history"][len(self.state["history"]) - self.state["job"] :]
        worked = sum(weights[d["optimizer"], tuple(d["keys"])] for d in done)
        decisions: int = plan.decisions - self.state["decision"]
        total = sum(weights.values()) * part
        ahead = max(total - worked, job.weight) + (decisions - 1) * total
        return self._free(plan) * job.weight / ahead

    def _free(self, plan: Plan) -> float:
        """Return the system runs left for jobs: those that decisions will need are set aside."""
        decisions: int = plan.decisions - self.state["decision"]
        return max(0.0, self._runs_left() - decisions * plan.cost)

    async def _work(self, job: Job, share: float) -> None:
        """Let one optimizer propose, checkpointing its progress."""
        state = self.state
        number = len(state["history"])
        if state["optimizer"] is None:
            self.proposals.begin_job(requests_of(self.problem, job, share, self._allowance.outlook))
        most = state["current"]["caps"]
        self.proposals.limit(lambda usage: within(usage, most))
        scorer = JobScorer(
            self.problem,
            self.executor,
            self._working(),
            share,
            state["spent"],
            self.proposals,
            self._runs_left,
        )
        scorer.restore(state["scored"])
        task = Task(
            system=self._working(),
            keys=job.keys,
            train=self.problem.train,
            scorer=scorer,
            seed=stream(self.problem.settings.seed, "job", number),
            pool_seed=stream(self.problem.settings.seed, "pool"),
            minibatch=job_minibatch(self.problem.settings.minibatch, share),
            candidates=self.problem.settings.candidates,
            bench=Bench(
                self.executor,
                self.problem.metric,
                self.problem.rules,
                self.recorder.memory,
                self.problem.folder,
            ),
            tried=[Tried(*t) for t in state["tried"] if sorted(t[0]) == sorted(job.keys)],
            resume=state["optimizer"],
        )
        proposal = Proposal({}, note="the budget ended before a proposal")
        if not share:
            proposal = Proposal({}, note="its share of the budget is too small to compare anything")
            self._finish(job, number, proposal, scorer)
            return
        try:
            async for event in self.problem.method.optimizers[job.optimizer].propose(task):
                if isinstance(event, Progress):
                    state.update(
                        optimizer=dict(event.state),
                        scored=scorer.snapshot(),
                        proposals=self.proposals.to_json(),
                    )
                    self.recorder.event("progress", job=number, note=event.note, **event.facts)
                    self._tell_news(number)
                else:
                    proposal = event
        except BudgetExhausted as error:
            state["stopped"] = error.message
        self._finish(job, number, proposal, scorer)

    def _tell_news(self, number: int) -> None:
        """Record each piece of news once: the checkpoint of its event no longer holds it."""
        while self.proposals.news:
            note = self.proposals.news.pop(0)
            self.state["proposals"] = self.proposals.to_json()
            self.recorder.event("proposals", job=number, note=note)

    def _finish(self, job: Job, number: int, proposal: Proposal, scorer: JobScorer) -> None:
        state = self.state
        requests = since(self.proposals.to_json(), state["current"]["proposals"])
        notes = [proposal.note] if proposal.note else []
        if any(tally["failed"] or tally["unusable"] for tally in requests.values()):
            notes.append(f"proposals: {described(requests)}")
        state["working"] = {**state["working"], **dict(proposal.values)}
        state["tried"] += [[t.values, t.score, t.n] for t in scorer.tried(job.keys)]
        record = {
            "job": number, "optimizer": job.optimizer, "keys": list(job.keys), "reason": dict(job.reason),
            "values": dict(proposal.values), "train_before": proposal.before, "train_after": proposal.after,
            "tried": proposal.tried, "runs": self.meter.system_runs - state["spent"],
            "note": "; ".join(notes), "facts": dict(proposal.facts), "proposals": requests,
        }  # fmt: skip
        opening = self.problem.method.opening is not None and not state["history"]
        state["history"].append(record)
        state.update(
            job=state["job"] + (not opening), current=None, optimizer=None, scored=[],
            proposals=self.proposals.to_json(),
        )  # fmt: skip
        self.recorder.event("job", **record)
        self._tell_news(number)

    def _working(self) -> System:
        return self.problem.bind({**self.state["best"], **self.state["working"]})

    async def _decide(self) -> None:
        """Compare the working configuration with the best on validation examples; accept or drop it."""
        state, plan = self.state, Plan(**self.state["plan"])
        best, working = self.problem.bind(state["best"]), self._working()
        changes = [[c.key, c.before, c.after] for c in best.configuration.diff(working.configuration)]
        state.update(job=0, working={})
        if not changes:
            self._idle()
            return
        number = state["decision"] + 1
        record: dict[str, Any] = {
            "decision": number,
            "level": plan.level,
            "accepted": False,
            "changes": changes,
        }
        try:
            record |= await self._compare(best, working, number)
        except BudgetExhausted as error:
            state["stopped"] = error.message
            record["note"] = "the budget ended before the decision"
        if record["accepted"]:
            state["best"] = working.configuration.to_json()
        state.update(decision=number, idle=0)
        if number == plan.decisions and not state["stopped"]:
            all_ = "the planned decision is" if number == 1 else f"all {number} planned decisions are"
            state["stopped"] = f"{all_} made"
        self.recorder.event("decision", **record)

    def _idle(self) -> None:
        """Note a sweep that found nothing; after a few in a row the search ends."""
        state = self.state
        state["idle"] += 1
        if self.problem.method.jobs_each is not None:  # what was planned has had its turn
            state["decision"] += 1
            if state["decision"] == Plan(**state["plan"]).decisions and not state["stopped"]:
                state["stopped"] = "all planned jobs are done"
        if state["idle"] >= PATIENCE and not state["stopped"]:
            state["stopped"] = f"{PATIENCE} sweeps in a row proposed nothing"
        self.recorder.event("sweep", note="nothing to decide about", idle=state["idle"])

    async def _compare(self, best: System, working: System, number: int) -> dict[str, Any]:
        """Measure both on fresh samples (where samples differ at all) and test the difference."""
        samples = self._samples(number)
        before = await self._evaluate(best, self.problem.valid, samples)
        after = await self._evaluate(working, self.problem.valid, samples)
        p = paired_test(
            before.scores, after.scores, rng=generator(self.problem.settings.seed, "decision", number)
        )
        gain = gain_interval(before, after).to_json()
        accepted = p <= self.state["plan"]["level"]
        if accepted:
            self.state["incumbent"] = after.to_json()
        return {
            "accepted": accepted, "p": p, "before": before.summary(), "after": after.summary(),
            "gain": {name: gain[name] for name in ("mean", "low", "high")},
        }  # fmt: skip

    def _samples(self, number: int) -> list[int]:
        """Return sample indices that no earlier decision used (samples are all one without chance)."""
        repeats = self.problem.settings.repeats
        if not stochastic(self.problem.system):
            return [0]
        return [number * repeats + i for i in range(repeats)]

    async def _test(self) -> None:
        """Read the test split, once, for the starting and the final configuration."""
        state, problem = self.state, self.problem
        samples = [TEST_SAMPLES + s for s in self._samples(0)] if stochastic(problem.system) else [0]
        executor = self.executor.charging(self.test_meter)
        systems = {"test_before": problem.system, "test_after": problem.bind(state["best"])}
        for name, system in systems.items():
            if name in state:
                continue
            skipped = ""
            if not problem.test:
                state[name] = None
            elif name == "test_after" and system.configuration == problem.system.configuration:
                state[name] = state["test_before"]
            else:
                state[name], skipped = await self._read_test(executor, system, samples)
            self.recorder.event(
                name, **self._summary(state[name]), **({"skipped": skipped} if skipped else {})
            )

    async def _read_test(self, executor: Executor, system: System, samples: list[int]) -> tuple[Any, str]:
        """Return the evaluation, or why there is none."""
        try:
            evaluation = await evaluate(
                executor, system, self.problem.test, self.problem.metric, samples=samples,
                rules=self.problem.rules, on_trace=self.recorder.trace("test"),
            )  # fmt: skip
        except BudgetExhausted as error:
            return None, error.message
        return evaluation.to_json(), ""

    @staticmethod
    def _summary(evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
        return Evaluation.from_json(evaluation).summary() if evaluation else {}

    async def _evaluate(self, system: System, examples: Sequence[Example], samples: list[int]) -> Evaluation:
        return await evaluate(
            self.executor, system, examples, self.problem.metric, samples=samples, rules=self.problem.rules,
            on_trace=self.recorder.trace("valid"),
        )  # fmt: skip


def final_configuration(state: Mapping[str, Any], folder: Path) -> Configuration:
    """Return the best configuration of a run's state; ``folder`` is the run's memory."""
    return Configuration(state["best"]).located(folder)
