"""A server of S3's API on loopback, of the library moto.

Not part of the normal run: ``make test-ray`` sets REAL_RAY. Without it nothing here is collected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

collect_ignore_glob = [] if os.environ.get("REAL_RAY") else ["*"]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a server."""
    from moto.server import ThreadedMotoServer

    made = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket, ``s3://bucket``, whose server and keys the environment names."""
    import boto3
    import fsspec

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "key-of-the-user",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-user",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()
    made = boto3.resource("s3").create_bucket(Bucket="bucket")
    yield made
    made.objects.delete()
    made.delete()
