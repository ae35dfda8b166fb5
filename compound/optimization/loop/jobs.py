"""Jobs of a search: choose the next one, assign it a share of the budget, and run its optimizer."""

from __future__ import annotations

from dataclasses import replace

from compound.core.errors import BudgetExhausted
from compound.execution.rng import derive_seed
from compound.optimization.budget_plan import (
    is_within,
    job_minibatch,
    plan_job,
    planned_job_runs,
    proposal_caps,
)
from compound.optimization.loop.context import RunContext
from compound.optimization.method import Job, JobContext, JobRecord, Progress, Proposal, Task
from compound.optimization.proposals import describe_requests, requests_since
from compound.optimization.registration import RunningOptimizer, choose_job
from compound.optimization.runs.state import JobState
from compound.optimization.scorer import JobScorer


class Jobs:
    """Runs the jobs before a decision."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    async def run_round(self) -> None:
        """Run the jobs of a round; before the last decision, as many as the budget allows while they help."""
        context, search = self._context, self._context.search
        plan = context.budget.plan
        while not search.stopped:
            if search.jobs_in_round == plan.jobs:
                if not (more := self._further_jobs()):
                    return
                search.jobs_in_round = plan.jobs - more
            if search.job is None and not context.budget.fits_another_job(search):
                search.stopped = self._too_small_reason(context.budget.smallest_job(search))
                return
            await self._run(self._job())

    def _too_small_reason(self, smallest: float) -> str:
        reason = "the remaining budget is too small for another job"
        context, search = self._context, self._context.search
        if search.history:
            return reason
        limits = context.problem.settings.budget.limits()
        limit = f"optimize.budget.{next(iter(limits))}" if len(limits) == 1 else "optimize.budget"
        return (
            f"{reason}: the first needs {smallest:g} system runs, {context.budget.free(search):g} are free, "
            f"and {context.budget.plan.cost:g} are reserved for its decision; raise {limit}"
        )

    def _further_jobs(self) -> int:
        """Return the number of further jobs before the last decision, within `iterations` rounds."""
        context, search = self._context, self._context.search
        plan, problem = context.budget.plan, context.problem
        settings, method = problem.settings, problem.method
        last = search.history[-len(method.jobs) :]
        useful = any(record.values for record in last) and any(record.runs for record in last)
        finished = len(search.history) >= len(method.jobs) * settings.iterations
        is_last = plan.decisions - search.decisions == 1
        if method.jobs_each is not None or not useful or not is_last or finished:
            return 0
        least = planned_job_runs(problem, context.budget.prices)
        free = context.budget.free(search)
        return plan.jobs if free >= plan.jobs * least else int(free // least)

    def _job(self) -> JobState:
        """Return the job in progress, or choose the next one and its share of the budget."""
        context, search = self._context, self._context.search
        if search.job is None:
            method = context.problem.method
            opening = method.opening if not search.history else None
            seed = derive_seed(context.problem.settings.seed, "scheduler")
            job = opening or choose_job(method, search.history, seed)
            search.job = JobState(
                optimizer=job.optimizer,
                keys=job.keys,
                reason=dict(job.reason),
                share=context.budget.runs_of(job, opening, search),
                spent_before=context.meter.system_runs,
                proposal_limits=proposal_caps(
                    context.meter.budget, context.meter.usage, context.proposals.state.usage
                ),
                ledger_before=context.proposals.snapshot(),
            )
        return search.job

    async def _run(self, job: JobState) -> None:
        context, search = self._context, self._context.search
        number = len(search.history)
        self._limit_requests(job)
        scorer = JobScorer(
            context.problem,
            context.executor,
            context.working(),
            job.share,
            job.spent_before,
            context.proposals,
            context.budget.runs_left,
            observe=context.candidates.observer("train", number, job.optimizer),
        )
        scorer.restore(job.scored)
        if not job.share:
            note = "its share of the budget is too small to compare anything"
            self._finish(job, Proposal({}, note=note), scorer)
            return
        plan = context.budget.plan
        known = (
            context.problem.method.jobs_each is not None
        )  # otherwise, jobs follow as runs are left
        last = (search.decisions + 1, search.jobs_in_round + 1) == (plan.decisions, plan.jobs)
        context.enter("searching", plan.cost if known and last else None)
        proposal: Proposal | None = None
        method = context.problem.method
        proposing = RunningOptimizer(job.optimizer, method.optimizers[job.optimizer])
        try:
            async for event in proposing.events(self._task(job, number, scorer)):
                if isinstance(event, Progress):
                    self._checkpoint(job, number, event, scorer)
                else:
                    proposal = event
        except BudgetExhausted as error:
            search.stopped = error.message
            proposal = proposal or Proposal({}, note="the budget was exhausted before a proposal")
        proposal = proposing.validate(proposal, context.working())
        self._finish(job, proposal, scorer)

    def _limit_requests(self, job: JobState) -> None:
        context = self._context
        if job.progress is None:
            chosen = Job(job.optimizer, job.keys, job.reason)
            plan = plan_job(context.problem, chosen, job.share)
            context.proposals.start_job(None if plan is None else plan.most())
        context.proposals.limit(lambda usage: is_within(usage, job.proposal_limits))

    def _task(self, job: JobState, number: int, scorer: JobScorer) -> Task:
        context, problem = self._context, self._context.problem
        settings, prices = problem.settings, context.budget.prices
        working, ledger = context.working().configuration, context.candidates
        return Task(
            system=context.working(),
            keys=job.keys,
            train=problem.train,
            scorer=scorer,
            seed=derive_seed(settings.seed, "job", number),
            pool_seed=derive_seed(settings.seed, "pool"),
            minibatch=job_minibatch(settings.minibatch, job.share, prices.keys(job.keys)),
            candidates=settings.candidates,
            context=JobContext(
                context.executor,
                problem.metric,
                problem.rules,
                context.recorder.memory,
                problem.folder,
                problem.earlier,
            ),
            tried=[known for known in context.search.tried if set(known.values) == set(job.keys)],
            prices=prices,
            meets_limits=lambda values: not ledger.broken_limits(working.replace(values)),
            note_origin=lambda values, parent, source: ledger.note_origin(
                working.replace(values), working.replace(parent), source
            ),
            resume=job.progress,
        )

    def _checkpoint(self, job: JobState, number: int, event: Progress, scorer: JobScorer) -> None:
        context = self._context
        job.progress = dict(event.state)
        job.scored = scorer.snapshot()
        context.search.ledger = context.proposals.snapshot()
        steps = {} if event.step is None else {"step": event.step, "of": event.of}
        context.recorder.written = event.written
        context.recorder.event("progress", job=number, note=event.note, **steps, **event.facts)
        context.record_violation(scorer.violation)
        context.record_news(number)

    def _within_limits(self, job: JobState, proposal: Proposal) -> Proposal:
        """Return the proposal, or the best candidate within the limits if it exceeds one."""
        context = self._context
        working = context.working().configuration
        broken = context.candidates.broken_limits(working.replace(proposal.values))
        if not broken:
            return proposal
        found = context.candidates.best_within_limits(working, job.keys)
        values = (
            {} if found is None else {c.key: found.to_json()[c.key] for c in working.diff(found)}
        )
        what = "the proposal" if proposal.values else "the current configuration"
        best = "the best candidate within the limits is proposed"
        done = best if values else "no candidate meets the limits"
        note = f"{what} exceeds a limit ({', '.join(broken)}): {done}"
        return replace(
            proposal, values=values, after=None, note="; ".join(filter(None, [proposal.note, note]))
        )

    def _finish(self, job: JobState, proposal: Proposal, scorer: JobScorer) -> None:
        context, search = self._context, self._context.search
        number = len(search.history)
        proposal = self._within_limits(job, proposal)
        requests = requests_since(context.proposals.snapshot(), job.ledger_before)
        notes = [proposal.note] if proposal.note else []
        if any(tally["failed"] or tally["unusable"] for tally in requests.values()):
            notes.append(f"proposals: {describe_requests(requests)}")
        record = JobRecord(
            job=number,
            optimizer=job.optimizer,
            keys=job.keys,
            reason=job.reason,
            values=dict(proposal.values),
            train_before=proposal.before,
            train_after=proposal.after,
            tried=proposal.tried,
            runs=context.meter.system_runs - job.spent_before,
            note="; ".join(notes),
            facts=dict(proposal.facts),
            proposals=requests,
        )
        is_opening = context.problem.method.opening is not None and not search.history
        search.working = {**search.working, **proposal.values}
        search.tried = [*search.tried, *scorer.scored_for(job.keys)]
        search.history = [*search.history, record]
        search.jobs_in_round += not is_opening
        if proposal.values:
            context.candidates.propose(context.working().configuration)
        context.write_candidates()
        search.job = None
        search.ledger = context.proposals.snapshot()
        context.recorder.event("job", **record.model_dump(mode="json"))
        context.record_violation(scorer.violation)
        context.record_news(number)
