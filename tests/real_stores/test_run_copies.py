"""A finished run is copied to S3 and back, and nothing of it is written outside its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.api.verify import copy_run, verify
from compound.core.errors import RunDirectoryError
from run_files import finished_run

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("finished") / "run")


def test_a_copy_of_a_copy_is_the_run(bucket: Any, finished: Path, tmp_path: Path) -> None:
    bucket.put_object(Key="runs/one/", Body=b"")  # a folder that the console of S3 made
    assert copy_run(finished, "s3://bucket/runs/one") > 5
    back = tmp_path / "deep" / "back"
    copy_run("s3://bucket/runs/one", back)
    assert verify(back) == []
    assert cp.load_result(back).best == cp.load_result(finished).best
    assert {p.name for p in back.iterdir()} == {p.name for p in finished.iterdir()} - {"lock"}
    with pytest.raises(RunDirectoryError, match="holds other files"):
        copy_run(finished, "s3://bucket/runs/one")


def test_a_large_file_is_copied_in_parts(bucket: Any, finished: Path, tmp_path: Path) -> None:
    with (finished / "report.html").open("ab") as report:
        report.write(b"<!-- -->" * 2**22)  # more than one request
    copy_run(finished, "s3://bucket/one")
    copy_run("s3://bucket/one", tmp_path / "back")
    assert (tmp_path / "back/report.html").read_bytes() == (finished / "report.html").read_bytes()


def test_a_missing_bucket_is_named(bucket: Any, finished: Path, tmp_path: Path) -> None:
    for source, target in ((finished, "s3://nobody/one"), ("s3://nobody/one", tmp_path / "new")):
        with pytest.raises(RunDirectoryError, match="s3://nobody/one cannot be used.*not exist"):
            copy_run(source, target)


@pytest.mark.parametrize("key", ["one/../../escaped", "one/sub/../../x", "one//x", "one/./x"])
def test_no_file_of_a_copy_leads_outside_its_folder(
    bucket: Any, finished: Path, tmp_path: Path, key: str
) -> None:
    copy_run(finished, "s3://bucket/one")
    bucket.put_object(Key=key, Body=b"bad")
    with pytest.raises(RunDirectoryError, match="not a valid file name"):
        copy_run("s3://bucket/one", tmp_path / "a" / "b" / "new")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
