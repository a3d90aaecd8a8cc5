"""The fixtures of the end-to-end tests: real servers, one at a time in each test process."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.support.reference import Reference, demo_reference, tiny_reference
from tests.support.server import DEMO, Server, running_server


@pytest.fixture(scope="session")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of the spec given by `served_by`, shared by its tests; when the last is through, it must stop cleanly."""
    spec = request.param
    folder = tmp_path_factory.mktemp(spec.id)
    with running_server(spec.command_line(folder), folder, spec=spec) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """The running server. After the test nothing may be held on any rank."""
    yield running
    running.wait_until_idle()


@pytest.fixture
def reference(running: Server) -> Reference:
    """transformers + peft with the server's model and adapters."""
    assert running.spec is not None
    return demo_reference() if running.spec.family == DEMO else tiny_reference(running.spec.family)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the end of its server's log."""
    report = yield
    server = getattr(item, "funcargs", {}).get("running")
    if report.failed and isinstance(server, Server):
        report.sections.append(("server log", server.log_tail()))
    return report
