"""``mgpu-pipe serve`` as a user runs it: the oracle of its answers is the run's own ``generate``."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.inference.generation import generate_text
from mgpu_pipe.inference.open import LoadedRun, load_run
from mgpu_pipe.inference.visual_prompts import PromptVisuals
from mgpu_pipe.serving.server.answerer import Answerer
from mgpu_pipe.serving.server.requests import read_request
from tests.inference.support import write_run, write_texts
from tests.inference.test_seen_and_heard import STRONG
from tests.objectives.test_vision_language import chats
from tests.serving.servers import CONTEXT, QUESTIONS, Server, serving, train_run
from tests.support import small_runs
from tests.support.command import REPOSITORY, mgpu, start
from tests.support.documented import blocks
from tests.support.needs import need_openai, need_server
from tests.support.sampling import one_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_server()
    folder = tmp_path_factory.mktemp("serving")
    train_run(folder, folder / "cache")
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Iterator[LoadedRun]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_PIPE_CACHE", str(place / "cache"))
        yield load_run(place / "run")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    with serving(place / "cache", place, "run") as started:
        yield started


def greedy(run: LoadedRun, prompt: str, tokens: int, is_chat: bool) -> str:
    chat = run.chat() if is_chat else None
    [text] = generate_text(run.model, run.tokenizer(), [prompt], chat=chat, max_new_tokens=tokens, temperature=0)
    return text


def test_answers_equal_the_runs(server: Server, run: LoadedRun) -> None:
    assert server.printed[0] == "5 of 5 greedy answers equal the run's\n"
    for question in QUESTIONS[:4]:
        completion = server.complete(question, max_tokens=24)
        assert completion["choices"][0]["text"] == greedy(run, question, 24, is_chat=False)
        turns = [{"role": "user", "content": question}]
        body = {"model": "talk", "messages": turns, "temperature": 0, "max_tokens": 24}
        status, content = server.send("/v1/chat/completions", body)
        answer = json.loads(content)
        assert status == 200 and answer["usage"]["completion_tokens"] == 24
        expected = greedy(run, question, 24, is_chat=True)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}


def test_a_stream_joins_to_the_whole_answer(server: Server) -> None:
    whole = server.complete("Is 3 even?", max_tokens=40)
    events = server.stream("Is 3 even?", max_tokens=40, stream_options={"include_usage": True})
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert len(texts) > 10 and "".join(texts) == whole["choices"][0]["text"]
    assert events[-1]["usage"] == whole["usage"] and events[-2]["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_ends_an_answer_before_it(server: Server) -> None:
    whole = server.complete("Is 3 even?", max_tokens=40)["choices"][0]["text"]
    stop = whole[20:24]
    expected = whole[: whole.index(stop)]
    answer = server.complete("Is 3 even?", max_tokens=40, stop=["never there", stop])["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (expected, "stop")
    streamed = server.stream("Is 3 even?", max_tokens=40, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in streamed) == expected


def test_a_temperature_next_to_zero_is_zero(server: Server) -> None:
    cold = server.complete("Is 3 even?", max_tokens=8, temperature=1e-300)
    assert cold["choices"] == server.complete("Is 3 even?", max_tokens=8)["choices"]


def test_a_seed_repeats_a_draw(server: Server) -> None:
    draws = [
        server.complete("Is", max_tokens=20, temperature=1.5, top_p=0.9, seed=seed)["choices"][0]["text"]
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"{", 400, "no JSON"),
        (b"[]", 400, "no JSON object"),
        ({"prompt": "a " * 3 * CONTEXT}, 400, f"the model's context is {CONTEXT}"),
        ({"prompt": "a", "n": 2}, 400, "n=2"),
        ({"prompt": "a", "top_k": 5}, 400, "top_k=5"),
        ({"prompt": "a", "tool_choice": "required"}, 400, "tool_choice"),
        ({"prompt": "a", "stream": "yes"}, 400, "stream='yes'"),
        ({"prompt": "a", "stream_options": 3}, 400, "stream_options=3"),
        ({"prompt": "a\ud83d"}, 400, "surrogates"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0"),
        ({"prompt": "a", "temperature": True}, 400, "temperature=True"),
        ({"prompt": [1, 2]}, 400, "prompt"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "'talk'"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": "x" * 17_000_000}, 413, "bytes"),
    ],
)
def test_a_bad_request_is_refused_in_openais_form(
    server: Server, body: bytes | dict[str, object], status: int, part: str
) -> None:
    code, content = server.send("/v1/completions", body)
    assert code == status and part in json.loads(content)["error"]["message"], content


def image_part(content: bytes) -> dict[str, Any]:
    """A picture in lines, as the command ``base64`` writes them."""
    return {"type": "image_url", "image_url": {"url": f"Data:image/png;base64,{base64.encodebytes(content).decode()}"}}


def asked(server: Server, *parts: dict[str, Any]) -> tuple[int, str]:
    """The status, and the greedy answer or the refusal, of a question with these parts."""
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    status, body = server.send("/v1/chat/completions", {"messages": turns, "temperature": 0, "max_tokens": 8})
    answer = json.loads(body)
    return status, answer["choices"][0]["message"]["content"] if status == 200 else answer["error"]["message"]


def test_questions_about_pictures_are_answered_as_by_the_run(tmp_path: Path) -> None:
    need_server()
    small_runs.run(chats, tmp_path / "run", 1, STRONG, "trainer.max_steps=1", "strategy=single")
    files = [tmp_path / "p" / name / "0.png" for name in ("dark", "light")]
    run = load_run(tmp_path / "run")
    turns = [{"role": "user", "content": "<image><image>What is it?"}]
    visuals, given = PromptVisuals.from_files(run, files), {"chat": run.chat(), "max_new_tokens": 8, "temperature": 0}
    [expected] = generate_text(run.model, run.tokenizer(), [turns], visuals=visuals, **given)  # type: ignore[arg-type]
    pictures = [image_part(file.read_bytes()) for file in files]
    noise = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    address = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    with serving(tmp_path / "cache", tmp_path, "run") as server:
        assert asked(server, *pictures) == (200, expected)
        assert asked(server, *pictures[::-1])[1] != expected
        for part, problem in (
            (image_part(b"no picture"), "image-1: "),
            (noise, "audio-1: LlavaForConditionalGeneration hears no recordings"),
            (address, "messages[0]: image_url is no data"),
            ({"type": "input_audio", "input_audio": "x"}, "messages[0]: input_audio: has no data"),
            ({"type": "file"}, "messages[0]: a part is none of text, image_url"),
            ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}, "no base64"),
        ):
            status, refusal = asked(server, part)
            assert status == 400 and problem in refusal and str(tmp_path) not in refusal, refusal
        assert asked(server, *pictures * 33) == (400, "messages: more than 64 pictures and recordings; send fewer")


def test_a_run_on_texts_answers_by_the_template_of_its_tokenizer(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "llama", write_texts(tmp_path / "texts", 12), tmp_path / "cache")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").write_text(template)
    run = load_run(tmp_path / "run")
    request = read_request({"messages": [{"role": "user", "content": "the"}]}, is_chat=True)
    pieces = Answerer(run, {"run": run.model}).answer(request)
    with pytest.raises(asyncio.TimeoutError):  # it is accepted, and nothing computes it here
        asyncio.run(asyncio.wait_for(anext(pieces), 0.2))
    assert run.chat() is None


def test_only_the_token_opens_the_interface_and_the_page_is_open(server: Server) -> None:
    for token in ("", "Bearer wrong", f"Basic {server.token}"):
        assert server.send("/v1/models", Authorization=token)[0] == 401
    assert json.loads(server.send("/v1/models")[1])["data"][0]["id"] == "talk"
    for file in ("/", "/page.js", "/page.css"):
        assert server.send(file, Authorization="")[0] == 200
    assert b"page.js" in server.send("/")[1] and server.send("/v1/nothing")[0] == 404
    assert f"#token={server.token}" in server.printed[1]


def test_openais_client_is_answered(server: Server, run: LoadedRun) -> None:
    need_openai()
    import openai

    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=server.token, max_retries=0)
    assert [model.id for model in client.models.list()] == ["talk"] == [client.models.retrieve("talk").id]
    with pytest.raises(openai.NotFoundError, match="'talk'"):
        client.models.retrieve("gpt-4")
    expected = greedy(run, "Is 5 even?", 24, is_chat=True)
    stream = client.chat.completions.create(
        model="talk", messages=[{"role": "user", "content": "Is 5 even?"}], temperature=0, max_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    completion = client.completions.create(model="talk", prompt="Is 5 even?", temperature=0, max_tokens=24)
    assert completion.choices[0].text == greedy(run, "Is 5 even?", 24, is_chat=False)
    assert completion.usage is not None and completion.usage.completion_tokens == 24
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="talk", prompt="a " * 3 * CONTEXT)


def ask_raw(server: Server, body: dict[str, object]) -> socket.socket:
    """A connection that has sent a request, and has read nothing."""
    host, port = server.address.removeprefix("http://").split(":")
    connection, content = socket.create_connection((host, int(port))), json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_clients_that_hang_up_end_their_generation(server: Server) -> None:
    """Answers of the whole context would each take several seconds; the last request waits for none of them."""
    long = {"model": "talk", "prompt": "Is", "temperature": 0, "max_tokens": CONTEXT}
    began = time.monotonic()
    server.complete("Is", max_tokens=CONTEXT)
    of_one = time.monotonic() - began
    for stream in [False, True] * 10:
        connection = ask_raw(server, {**long, "stream": stream})
        if stream:
            assert connection.recv(5)
        connection.close()
    began = time.monotonic()
    assert server.complete("Is", max_tokens=1)["usage"]["completion_tokens"] == 1
    assert time.monotonic() - began < 5 * of_one  # twenty answers would take 20 times as long


def test_a_thousand_slow_clients_keep_nobody_out(server: Server) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    slow = []
    try:
        for _ in range(1000):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            slow.append(connection)
        assert server.complete("Is", max_tokens=2)["usage"]["completion_tokens"] == 2
        slow[0].settimeout(60)
        assert slow[0].recv(1) == b""  # the server hangs up
    finally:
        for connection in slow:
            connection.close()


def test_too_many_requests_are_refused(server: Server) -> None:
    body = {"model": "talk", "prompt": "Is", "temperature": 0, "max_tokens": CONTEXT, "stream": True}
    connections = [ask_raw(server, body) for _ in range(64)]
    assert connections[0].recv(5)
    for _ in range(100):
        status, content = server.send("/v1/completions", {"model": "talk", "prompt": "Is", "max_tokens": 1})
        if status == 429:
            break
    assert status == 429 and "64 requests" in json.loads(content)["error"]["message"]
    for connection in connections:
        connection.close()


def is_open(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module")
def exported(place: Path) -> str:
    mgpu(place / "cache", place, "export", "run", "--out", "talk", "--dtype", "bf16")
    return "talk"


@pytest.mark.parametrize("number", one_in(2, [signal.SIGKILL, signal.SIGINT]))
def test_a_server_without_a_token_refuses_other_pages_and_ends_with_the_command(
    place: Path, exported: str, number: signal.Signals
) -> None:
    with serving(place / "cache", place, exported, "--no-token", program=start) as started:
        assert json.loads(started.send("/v1/models")[1])["data"][0]["id"] == "talk"
        assert started.send("/v1/models", Host="evil.example")[0] == 403
        body = {"model": "talk", "prompt": "Is", "max_tokens": 1}
        assert started.send("/v1/completions", body)[0] == 200
        assert started.send("/v1/completions", body, **{"Content-Type": "text/plain"})[0] == 415

        children = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children").read_text().split()
        assert len(children) == 2, "a server and the orphan guard"
        os.kill(started.process.pid, number)
        assert started.process.wait(60) == (-9 if number == signal.SIGKILL else 0)
        deadline = time.monotonic() + 60
        while is_open(started.address) or any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_port_in_use_a_bad_token_and_an_open_network_are_one_line(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = mgpu(place / "cache", place, "serve", "run", "--port", str(port), code=2)
        assert said.count("\n") == 1 and f"--port={port}" in said and "in use" in said
    for words, part in (
        (("--no-token", "--host", "0.0.0.0"), "--host=0.0.0.0"),
        (("--token", "ä"), "--token"),
        (("--port", "70000"), "65535"),
        (("--host", "192.0.2.1"), "192.0.2.1"),
        (("--dtype", "bf16", "--out", "cache"), "not a model folder"),
    ):
        said = mgpu(place / "cache", place, "serve", "run", *words, code=2)
        assert said.count("\n") == 1 and part in said, said


def test_another_answer_is_an_error(place: Path, server: Server) -> None:
    """The server has recorded the run's answers."""
    [record] = (place / "cache" / "served").glob("*-hf-fp32.json")
    answers = json.loads(record.read_text())
    other = {**answers, "answers": [*answers["answers"][:4], [answers["answers"][4][0], "something else"]]}
    record.write_text(json.dumps(other))
    try:
        said = mgpu(place / "cache", place, "serve", "run", "--check", "--port", "0", code=1)
    finally:
        record.write_text(json.dumps(answers))
    assert "the server is wrong: 4 of 5 greedy answers equal the run's" in said and "'something else'" in said


def test_the_python_of_the_guide(server: Server) -> None:
    need_openai()
    (program,) = [
        block.text for block in blocks(REPOSITORY / "docs" / "guides" / "serving.md") if block.language == "python"
    ]
    variables = {**os.environ, "BASE_URL": f"{server.address}/v1", "TOKEN": server.token}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
