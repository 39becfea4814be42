"""The report's server. Oracles: what HTTP says of tags and hosts, the run's own files."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urljoin, urlsplit

import pytest

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.report.watch import ReportServer, pages_of
from tests.report.fake_runs import MakeRun

Serve = Callable[..., ReportServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def start(*runs: RunPaths) -> ReportServer:
        server = ReportServer(pages_of(list(runs)), 0)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(server: ReportServer, path: str = "", **headers: str) -> tuple[int, str, str]:
    """Status, tag and text of a page below the server's address, or of a path that begins with ``/``."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    whole = urljoin(urlsplit(server.address).path, path) if ".." not in path else path
    connection.request("GET", whole, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["ETag"] or "", text


def test_a_page_is_sent_again_when_a_file_changed(make_run: MakeRun, serve: Serve) -> None:
    run = make_run(steps=60)
    server = serve(run)
    status, tag, text = get(server)
    assert (status, "connect-src" in text) == (200, True)
    assert get(server, If_None_Match=tag) == (304, tag, "")
    with open(run.metrics, "a") as file:
        file.write("61" + "," * run.metrics.read_text().splitlines()[0].count(",") + "\n")
    status, newer, _ = get(server, If_None_Match=tag)
    assert (status, newer != tag) == (200, True)


def test_only_this_machines_own_name_is_answered(make_run: MakeRun, serve: Serve) -> None:
    server = serve(make_run(steps=60))
    assert server.server_address[0] == "127.0.0.1"
    for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("evil.example", 403), ("evil.example:80", 403)):
        assert get(server, Host=host)[0] == status
    for path in ("metrics.csv", "/../config.yaml", "1"):
        assert get(server, path)[0] == 404


def test_another_user_of_the_machine_gets_nothing_without_the_token(make_run: MakeRun, serve: Serve) -> None:
    server, other = serve(make_run(steps=60)), serve(make_run(steps=60, name="other"))
    token = urlsplit(server.address).path
    assert len(token) > 40 and get(server)[0] == 200
    wrong = ("/", "/1", token[:-1], f"{token[:-2]}x/", f"/{'a' * (len(token) - 2)}/", f"{token}../../1")
    for path in (*wrong, urlsplit(other.address).path):
        status, tag, text = get(server, path)
        assert (status, tag, "quickstart" in text) == (404, "", False), path


def test_links_of_a_page_do_not_send_the_token(make_run: MakeRun, serve: Serve) -> None:
    server = serve(make_run(steps=60))
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", urlsplit(server.address).path)
    assert connection.getresponse().headers["Referrer-Policy"] == "no-referrer"
    connection.close()


def test_each_run_of_a_comparison_has_a_page(make_run: MakeRun, serve: Serve) -> None:
    server = serve(make_run(steps=60, name="one"), make_run(steps=60, name="two"))
    assert "Comparison of 2 runs" in get(server)[2]
    assert "<h1>two</h1>" in get(server, "2")[2]
    assert 'href="./2"' in get(server)[2]


def test_a_run_that_is_gone_is_told(make_run: MakeRun, serve: Serve) -> None:
    run = make_run(steps=60)
    server = serve(run)
    run.root.rename(run.root.parent / "moved")
    status, _, text = get(server)
    assert (status, "no such folder" in text) == (500, True)
