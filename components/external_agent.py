"""External agents: programs of any framework or language as components; their requests are calls."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveFloat, PositiveInt

from compound.components.agent_prompt import AgentPrompt
from compound.components.gateway.documents import Document, GatewayExchange, text_of, text_slots
from compound.core.errors import CallError, CompoundError, DeclarationError, OutputTypeError
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.limits import OUTPUT_DEPTH
from compound.core.security.sanitize import sanitize_text
from compound.core.storage.records import is_deep
from compound.execution.schedule import Mark
from compound.execution.sender import Attempt
from compound.graph.component import Input, Value, check_name, merge_addresses
from compound.graph.composite import Composite, RunBody
from compound.graph.configuration import digest
from compound.graph.fingerprint import code_digest
from compound.graph.json_values import dumps
from compound.graph.registry.code import place_of
from compound.graph.registry.user_code import located
from compound.graph.space import Choice
from compound.graph.system import System
from compound.graph.types import Port, accepts, convert, format_type

if TYPE_CHECKING:
    from compound.components.gateway.server import Gateway
    from compound.components.gateway.sessions import AgentSession

Isolation = Literal["worker", "run", "thread"]
GRACE = 0.5  # seconds that an agent has to end by itself after the error that ends its run
VERSION = 1
LOG = logging.getLogger("compound")


@report_wrong_arguments
class ExternalAgent(Composite):
    """An agent of any framework or language, run as it is.

    The agent is a Python function (``call``) or a program (``command``). It sends its requests to a
    gateway on loopback instead of a provider: an OpenAI-compatible server that answers them with
    the engines of the run. Each request is a call of the trace below the component's address, so
    that budgets, caches, credit and optimizers treat it like any other call. Requests that a prompt
    in ``prompts`` recognizes are rewritten with its tuned text and settings; others are sent as
    they are, as calls of ``NAME_other``.

    A function receives the inputs as keyword arguments. With ``isolation="worker"`` it runs in a
    process whose environment has ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, and which is reused by
    later runs; with ``"run"`` each run has a new process; with ``"thread"`` it runs in this process
    and receives the address as its parameters ``base_url`` and ``api_key``. A program reads the
    inputs as a JSON object on stdin, or at the places ``{input}`` of its arguments, and writes the
    outputs as a JSON object to stdout; a single text also as it is. If it writes nothing, a
    single text is the last answer of a model.

    Args:
        name: the component's name.
        call: the function, or its place ``module:name``. A function object that has a parameter
            ``base_url`` runs in a thread, others in a worker.
        command: the program and its arguments; ``{name}`` stands for the input of this name.
        prompts: the prompts to recognize, in order of precedence.
        output: one type (field ``output``), or types by field name.
        takes: declared inputs and their types; default: those that are connected.
        lm: the model for requests without a model of their prompt; default: the system's.
        isolation: ``worker``, ``run`` or ``thread``; see above.
        env: names of environment variables that the agent's process receives, in addition to common
            ones. Others, such as keys of providers, are removed.
        timeout: time limit of a run in seconds, without the time in which a request is answered.
        max_requests: maximum number of requests of a run; further ones are refused.
        concurrency: maximum number of processes of this agent.
        folder: folder of the module, and working directory of processes.

    Raises:
        DeclarationError: a setting is invalid, or not exactly one of ``call`` and ``command`` is
            given.

    Example:
        >>> from compound import Input, System, Text
        >>> agent = ExternalAgent("helper", command=["node", "agent.mjs"], prompts=[
        ...     AgentPrompt("answerer", system=Text("You are a helpful assistant."))])
        >>> system = System("qa", {"answer": agent(question=Input("question"))}, lm="smollm2")
        >>> list(system.parameters), sorted(system.components)
        (['answerer.system'], ['answerer', 'helper', 'helper_other'])
    """

    kind = "external_agent"
    keeps_partial_outputs = True

    def __init__(
        self,
        name: str,
        *,
        call: Callable[..., object] | str | None = None,
        command: Sequence[str] = (),
        prompts: Sequence[AgentPrompt] = (),
        output: object = str,
        takes: Mapping[str, object] | None = None,
        lm: str | Choice | None = None,
        isolation: Isolation | None = None,
        env: Sequence[str] = (),
        timeout: PositiveFloat = 300.0,
        max_requests: PositiveInt = 50,
        concurrency: PositiveInt = 4,
        folder: Path | str | None = None,
    ) -> None:
        check_name("ExternalAgent", name)
        self.name, self.output, self.takes = name, output, takes
        self.prompts = tuple(replace(p, lm=lm) if p.lm is None else p for p in prompts)
        self.lm = lm
        self.run_timeout = float(timeout)
        self.max_requests, self.concurrency = max_requests, concurrency
        self.call, self.command, self.env = call, tuple(command), tuple(env)
        self.isolation = isolation or _usual_isolation(call)
        self.folder = Path(folder or ".").absolute()
        self._check()
        other = AgentPrompt(f"{name}_other", match={}, lm=lm)
        self.body = _body(name, (*self.prompts, other))
        self._noted = False

    def _check(self) -> None:
        name = self.name
        if (self.call is None) == (not self.command):
            raise DeclarationError(
                f"agent {name!r} needs exactly one of call and command",
                hint="call='module:function', or command=['node', 'agent.mjs']",
            )
        if self.command and not all(isinstance(part, str) and part for part in self.command):
            raise DeclarationError(
                f"agent {name!r}: command must be a list of texts, the program first"
            )
        if self.call is not None and self.isolation != "thread" and self.place is None:
            raise DeclarationError(
                f"agent {name!r}: {self.call!r} cannot be imported by another process",
                hint="define it at the top of a module, or give it the parameters base_url and api_key and "
                "pass isolation='thread'",
            )
        if self.isolation == "thread" and not callable(self.call):
            raise DeclarationError(
                f"agent {name!r}: isolation='thread' needs the function itself as call"
            )
        if min(self.run_timeout, self.max_requests, self.concurrency) <= 0:
            raise ValueError("a limit is not above 0")  # `report_wrong_arguments` names it
        names = [prompt.name for prompt in self.prompts]
        twice = next((found for found in names if names.count(found) > 1), None)
        if twice is not None:
            raise DeclarationError(f"agent {name!r} has two prompts named {twice!r}")
        if any(not prompt.templates for prompt in self.prompts):
            raise DeclarationError(
                f"agent {name!r}: each prompt needs the text of a system or user message to be recognized by",
                hint="compound init FILE finds the prompts of an agent",
            )

    @property
    def place(self) -> str | None:
        """The function as ``module:name``, if it can be imported."""
        call = self.call
        return call if isinstance(call, str) else place_of(call) if call is not None else None

    @property
    def inputs(self) -> Mapping[str, Port] | None:  # noqa: D102
        return (
            None if self.takes is None else {name: Port(kind) for name, kind in self.takes.items()}
        )

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        fields = self.output if isinstance(self.output, Mapping) else {"output": self.output}
        return {name: Port(kind) for name, kind in fields.items()}

    @property
    def version(self) -> str:  # noqa: D102
        call = self.call
        code = code_digest(call) if callable(call) else call
        parts = [VERSION, code, list(self.command), self.body.signature]
        return "external_agent:" + digest(parts)

    def most_turns(self, sizes: Mapping[str, float]) -> float:  # noqa: D102
        return self.max_requests

    async def drive(  # noqa: D102
        self, inputs: Mapping[str, Value], values: Mapping[str, object], body: RunBody
    ) -> Mapping[str, Value] | None:
        from compound.components.gateway.server import gateway
        from compound.components.gateway.sessions import AgentSession

        # the calls that the agent's next step may depend on
        sources = merge_addresses(*(value.sources for value in inputs.values()))

        async def dispatch(exchange: GatewayExchange) -> Document | None:
            """Execute a request, and return its answer; ``None`` if it failed.

            It depends on all earlier answers: what an agent does with them is unknown.
            """
            nonlocal sources
            prompt = self._prompt_of(exchange)
            given = {"request": exchange.document, "route": exchange.route, "prompt": prompt}
            ran = await body(
                exchange.number, {n: Value(data, sources) for n, data in given.items()}
            )
            answer = (ran or {}).get(prompt)
            if answer is None or isinstance(answer.data, Mark):  # the trace records why
                return None
            sources = merge_addresses(sources, answer.sources)
            assert isinstance(answer.data, dict)  # the port's type
            session.last = text_of(answer.data)
            return answer.data

        names = (self.lm,) if isinstance(self.lm, str) else ("default",)
        async with gateway() as server:
            places = server.resources.setdefault(self, asyncio.Semaphore(self.concurrency))
            assert isinstance(places, asyncio.Semaphore)
            async with places:
                session = AgentSession(dispatch, names, self.max_requests)
                server.sessions[session.key] = session
                try:
                    result = await self._limited(session, self._run(server, session, inputs))
                finally:
                    del server.sessions[session.key]
                    await session.close()
        return {name: Value(data, sources) for name, data in self._outputs(result).items()}

    async def _run(
        self, server: Gateway, session: AgentSession, inputs: Mapping[str, Value]
    ) -> object:
        """Run the agent and return what it returned."""
        from compound.components.gateway.processes import (
            AgentWorkers,
            call_in_thread,
            environment,
            run_program,
        )

        given = {name: value.data for name, value in inputs.items()}
        if self.command:
            env = environment(self.env, server.base_url, session.key)
            command = [_argument(part, given) for part in self.command]
            output = await run_program(command, dumps(given).encode(), env, self.folder)
            single = self.outputs["output"].type if list(self.outputs) == ["output"] else None
            if session.last and single in (str, Any) and not output.strip():
                text = (
                    f"{self.name!r}: the program wrote nothing; its output is a model's last answer"
                )
                warnings.warn(text, stacklevel=2)
                return session.last
            return _parsed(output, single)
        if self.isolation == "thread":
            assert callable(self.call)
            address = {"base_url": server.base_url, "api_key": session.key}
            try:
                return await call_in_thread(self.call, given, address)
            except CompoundError:
                raise
            except Exception as error:
                raise CallError(
                    located(error, self.call).replace(session.key, "[key removed]")
                ) from error
        workers = AgentWorkers.of(server, self.place or "", self.folder, self.env)
        return await workers.call(session, given, fresh=self.isolation == "run")

    async def _limited(self, session: AgentSession, work: object) -> object:
        """Await the agent; end it at its time limit, or at an error that ends the run.

        The clock stands while a request is answered: a slow model does not count against the agent.
        """
        running = asyncio.ensure_future(work)  # type: ignore[call-overload]  # a coroutine
        try:
            async with asyncio.timeout(self.run_timeout) as timer:
                clock = Attempt()
                clock.timer = timer
                session.on_busy = lambda busy: (
                    None if timer.expired() else clock.pause() if busy else clock.resume()
                )
                await asyncio.wait({running, session.fatal}, return_when=asyncio.FIRST_COMPLETED)
                if session.fatal.done():
                    await asyncio.wait({running}, timeout=GRACE)
                    raise session.fatal.result()
                return await running
        except TimeoutError:
            if not timer.expired():
                raise
            raise CallError(
                f"the agent did not finish within {self.run_timeout:g} s, without the time of its requests",
                kind="timeout",
            ) from None
        finally:
            session.on_busy = lambda busy: None
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running

    def _prompt_of(self, exchange: GatewayExchange) -> str:
        """Return the name of the prompt of a request; warn of the first one without a declared prompt."""
        for prompt in self.prompts:
            if prompt.recognizes(exchange.route, exchange.document):
                return prompt.name
        if self.prompts and not self._noted:
            self._noted = True
            slots = text_slots(exchange.route, exchange.document)
            LOG.warning(
                "agent %r sent a request that no prompt recognizes, starting with %r; such requests are "
                "sent unchanged, as calls of %s_other. compound init FILE finds prompts",
                self.name,
                sanitize_text(next((slot.text for slot in slots), "")[:80]),
                self.name,
            )
        return f"{self.name}_other"

    def _outputs(self, result: object) -> Mapping[str, object]:
        """Return the outputs as declared.

        Raises:
            OutputTypeError: a field is missing or has another type.
        """
        ports = self.outputs
        single = list(ports) == ["output"]
        fields = (
            result
            if isinstance(result, Mapping) and (not single or set(result) == {"output"})
            else None
        )
        if fields is None and single:
            fields = {"output": result}
        if fields is None or not set(ports) <= set(fields):
            got = sorted(map(str, fields)) if fields is not None else type(result).__name__
            raise OutputTypeError(
                f"the agent must return the fields {sorted(ports)}, but returned {got}"
            )
        found = {}
        for name, port in ports.items():
            value = fields[name]
            if is_deep(value, OUTPUT_DEPTH):  # a record of it could not be read
                raise OutputTypeError(
                    f"the agent's output {name!r} is nested more than {OUTPUT_DEPTH} levels deep"
                )
            if not accepts(port.type, value):
                try:
                    value = convert(port.type, value)
                except ValueError:
                    raise OutputTypeError(
                        f"the agent's output {name!r} must be {format_type(port.type)}, but is {value!r:.200}"
                    ) from None
            found[name] = value
        return found


def _body(name: str, prompts: Sequence[AgentPrompt]) -> System:
    """Return the system that answers a request: one node per prompt, of which one runs."""
    request, route = Input("request", dict[str, object]), Input("route", str)
    chosen = Input("prompt", str)
    outputs = {}
    for prompt in prompts:
        made = prompt(request=request, route=route, when=chosen.equals(prompt.name))
        outputs[prompt.name] = made.response
    return System(name, outputs)


def _usual_isolation(call: object) -> Isolation:
    """Return ``thread`` for a function that takes the address of its model."""
    with contextlib.suppress(TypeError, ValueError):
        if callable(call) and "base_url" in inspect.signature(call).parameters:
            return "thread"
    return "worker"


def _argument(part: str, inputs: Mapping[str, object]) -> str:
    """Return an argument of a program with the inputs that it names; values other than texts as JSON.

    >>> _argument("--day={day}", {"day": 3}), _argument("{x}", {"day": 3})
    ('--day=3', '{x}')
    """

    def value(found: re.Match[str]) -> str:
        data = inputs.get(found[1], found[0])
        return data if isinstance(data, str) else dumps(data)

    return re.sub(r"\{(\w+)\}", value, part)


def _parsed(output: bytes, single: object = None) -> object:
    """Return the JSON that a program wrote: all of its output, or the last line of it that is JSON.

    If the single output that is declared has the type ``single``, ``str`` or ``Any``, it may also be
    a text as it is.

    >>> _parsed(b'starting\\n{"answer": "Lima"}\\n')
    {'answer': 'Lima'}
    >>> _parsed(b"42\\n", str)
    '42'
    """
    text = output.decode(errors="replace").strip()
    for part in (text, *reversed(text.splitlines())):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(part)
            if single is not str or isinstance(found, dict | str):
                return found
    if text and single in (str, Any):
        return text
    raise CallError(
        f"the agent's program wrote no JSON to stdout: {text[:200]!r}",
        hint='write one object with the outputs, such as {"output": "…"}',
    )
