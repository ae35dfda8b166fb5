"""Command that serves a system over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer

from compound.cli.options import (
    Config,
    File,
    NoImport,
    Sets,
    TrustOption,
    app,
    format_examples,
    load_program,
)

KEY = "COMPOUND_SERVE_KEY"


@app.command(
    epilog=format_examples(
        "serve system.yaml --config runs/demo/best.json",
        "serve system.yaml --port 8080 --feedback served",
        f"serve system.yaml --host 0.0.0.0   # needs a key in {KEY}",
    )
)
def serve(
    file: File,
    config: Config = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the bearer key.")
    ] = KEY,
    allow_host: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads this at run time
        typer.Option(help="Further name by which clients call the server; repeatable."),
    ] = None,
    allow_origin: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Web origin whose pages may call the server; repeatable."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of runs at a time.")] = 64,
    queue: Annotated[
        int, typer.Option(min=0, help="Maximum number of runs that wait; more get 429.")
    ] = 256,
    timeout: Annotated[float, typer.Option(help="Time limit of a run in seconds.")] = 120.0,
    max_body: Annotated[int, typer.Option(min=1, help="Maximum size of a body in bytes.")] = 2**20,
    drain: Annotated[
        float, typer.Option(help="Maximum seconds for runs in flight after SIGTERM.")
    ] = 30.0,
    drain_delay: Annotated[
        float,
        typer.Option(help="Seconds to accept requests after SIGTERM while /ready reports 503."),
    ] = 0.0,
    reload_seconds: Annotated[
        float,
        typer.Option(
            "--reload", help="Seconds between checks for a new configuration file; 0: none."
        ),
    ] = 1.0,
    feedback: Annotated[
        Optional[Path], typer.Option(help="Folder to record runs and feedback in.")  # noqa: UP045
    ] = None,
    max_feedback: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum size of that folder in bytes; nothing is recorded beyond."
        ),
    ] = 2**30,
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Serve a system over HTTP.

    POST /v1/run, /v1/batch, /v1/run/stream and /v1/feedback; /v1/chat/completions for systems with
    one text input and one output; /openapi.json, /health, /ready and /metrics. A changed
    configuration file is used without a restart. SIGTERM finishes the runs in flight.
    """
    from compound.api.serving import ServerSettings
    from compound.api.serving import serve as run_server

    settings = ServerSettings(
        host=host,
        port=port,
        key=os.environ.get(key_env) or None,
        allow_hosts=tuple(allow_host or ()),
        allow_origins=tuple(allow_origin or ()),
        concurrency=concurrency,
        queue=queue,
        timeout=timeout,
        max_body=max_body,
        drain=drain,
        drain_delay=drain_delay,
        reload=reload_seconds,
        feedback=feedback,
        max_feedback=max_feedback,
    )
    program = load_program(file, sets, no_import, trust=trust)
    run_server(program.system, config=config, engines=program.find_engine, settings=settings)
