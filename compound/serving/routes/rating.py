"""The route that receives feedback."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from pydantic import BaseModel, Field, create_model, model_validator
from starlette.requests import Request
from starlette.responses import Response

from compound.graph.system import System
from compound.serving.feedback_store import FeedbackStore, StoreError
from compound.serving.metrics import Metrics
from compound.serving.ports import Closed, documented, parse_body
from compound.serving.routes.runs import Handler
from compound.web.problems import Problem, json_response

MAX_COMMENT = 4_000
FORMS = "give run_id with a score, a correction or a comment, or give better and worse"


class FeedbackRequest(Closed):
    """Feedback on one run, or on two.

    Either ``run_id`` with at least one of ``score``, ``correction`` and ``comment``, or ``better`` and
    ``worse``, the ids of two runs with equal inputs.
    """

    run_id: str | None = None
    score: float | None = Field(
        None, ge=0, le=1, description="0 is useless, 1 is right.", allow_inf_nan=False
    )
    comment: str | None = Field(None, max_length=MAX_COMMENT)
    better: str | None = None
    worse: str | None = None

    @model_validator(mode="after")
    def check_form(self) -> Self:
        """Reject a mixture of the two forms."""
        correction: BaseModel | None = getattr(self, "correction", None)
        if correction is not None and not correction.model_fields_set:
            raise ValueError("a correction must name at least one output")
        about_one = [self.score, correction, self.comment]
        if self.run_id is not None:
            fits = any(value is not None for value in about_one) and self.better is self.worse is None
        else:
            fits = None not in (self.better, self.worse) and not any(value is not None for value in about_one)
        if not fits or (self.better is not None and self.better == self.worse):
            raise ValueError(FORMS)
        return self


def feedback_model(system: System) -> type[FeedbackRequest]:
    """Return the model of feedback on a system, with typed corrections of its outputs."""
    fields: dict[str, Any] = {
        f"port_{i}": (documented(source.type), Field(None, alias=name))
        for i, (name, source) in enumerate(system.outputs.items())
    }
    corrections: Any = create_model("Correction", __base__=Closed, **fields) | None
    correction: Any = (corrections, Field(None, description="The right outputs."))
    return create_model(
        "FeedbackRequest", __base__=FeedbackRequest, __doc__=FeedbackRequest.__doc__, correction=correction
    )


def feedback_handlers(
    store: FeedbackStore | None, model: type[FeedbackRequest], metrics: Metrics
) -> dict[str, Handler]:
    """Return the handler by path."""

    async def feedback(request: Request) -> Response:
        if store is None:
            raise Problem(
                404, "no_feedback", "this server records no feedback; start it with --feedback FOLDER"
            )
        given: Any = parse_body(model, await request.body())
        _check_runs(store, given)
        document = _document(given)
        try:
            await asyncio.wrap_future(store.add_feedback(document))
        except StoreError as error:
            raise Problem(503, "not_stored", error.message) from None
        metrics.rated("preference" if given.better is not None else "rating")
        return json_response({"stored": True}, 201)

    return {"/v1/feedback": feedback}


def _check_runs(store: FeedbackStore, given: FeedbackRequest) -> None:
    """Reject feedback on unknown runs, and preferences between runs with different inputs."""
    named = [run for run in (given.run_id, given.better, given.worse) if run is not None]
    for run in named:
        if not store.knows(run):
            raise Problem(404, "unknown_run", f"no run {run!r:.100} is recorded")
    if given.better is not None and given.worse is not None and not store.have_equal_inputs(*named):
        raise Problem(422, "different_inputs", "better and worse must be runs with equal inputs")


def _document(given: Any) -> dict[str, object]:  # noqa: ANN401 - an instance of `feedback_model`
    """Return feedback as it is stored."""
    if given.better is not None:
        return {"better": given.better, "worse": given.worse}
    document: dict[str, object] = {"run": given.run_id}
    if given.score is not None:
        document["score"] = given.score
    if given.correction is not None:
        document["correction"] = _correction(given.correction)
    if given.comment is not None:
        document["comment"] = given.comment
    return document


def _correction(values: BaseModel) -> dict[str, Any]:
    return values.model_dump(mode="json", by_alias=True, exclude_unset=True)
