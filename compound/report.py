"""placeholder"""


def write(path):
    (path / "report.md").write_text("todo")
