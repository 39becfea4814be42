"""Models and data of a Hub, as a user meets them: a server of the tests' own speaks its protocol.

Oracle of a run: the same one from local folders. What is asked of the server is counted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.hub.support import RUN, TINY, Place, folder_of, rows
from tests.support.command import environment
from tests.support.hub import TOKEN, files_of
from tests.support.program import ForkedProgram
from tests.support.worlds import free_port


@pytest.mark.slow
def test_a_model_by_name_trains_as_from_its_folder_and_its_resume_keeps_the_commit(
    place: Place, model: Path, texts: Path
) -> None:
    data = ("data=text_files", f"data.paths=[{texts}/*.txt]")
    truth = folder_of(place.run("model=hf", f"model.path={model}", *data, *RUN))
    named = ("model=hf", "model.path=acme/tiny", *data, *RUN, "run.dir=named", "checkpoint.resume=auto")
    said = place.run(*named, "trainer.max_steps=2")
    first = place.hub.model("acme/tiny").refs["main"]
    assert f"note: model.path: acme/tiny on the Hub, commit {first}" in said
    run = place.root / "named"
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["path"] == f"acme/tiny@{first}"
    assert str(place.root / "hf") not in (run / "config.yaml").read_text(), "no path of this machine"
    fetched = {path.name for path in (place.root / "hf").rglob(f"snapshots/{first}/*")}
    assert "model.safetensors" in fetched and not {"pytorch_model.bin", "onnx"} & fetched

    # The branch moves to other weights: the run goes on with what it began with.
    weights = (model / "model.safetensors").read_bytes()
    others = {**files_of(model), "model.safetensors": weights[:-64] + bytes(64)}
    second = place.hub.model("acme/tiny").commit(others)
    place.hub.requests.clear()
    said = place.run(*named)
    assert f"acme/tiny stays at commit {first}, which the run began with" in said
    assert not [one for one in place.hub.requests if "tiny" in one], "nothing is asked where all is there"
    assert rows(run) == rows(truth)
    refused = place.refused(*named, "model.path=acme/tiny@main", "trainer.max_steps=6")
    assert f"model.path=acme/tiny@{second}: the checkpoint" in refused and f"give acme/tiny@{first}" in refused


@pytest.mark.slow
@pytest.mark.exhaustive
def test_auto_finds_the_run_of_a_branch_that_moved_and_offline(place: Place, model: Path) -> None:
    words = ("model=hf", "model.path=acme/tiny", "data=synthetic", *RUN, "checkpoint.resume=auto")
    run = folder_of(place.run(*words, "trainer.max_steps=2"))
    place.hub.model("acme/tiny").commit({**files_of(model), "README.md": b"another commit"})
    assert folder_of(place.run(*words)) == run
    place.hub.refuse = 500
    said = place.run(*words, "trainer.max_steps=6", offline=True)
    assert "resuming from" in said and rows(run)[-2]["step"] == "6"
    # A revision that is typed is another run's, where it is another commit.
    place.hub.refuse = None
    said = place.run(*words, "model.path=acme/tiny@main")
    assert "starts a new run" in said and "model.path=acme/tiny@" in said


@pytest.mark.slow
def test_every_refusal_of_the_hub_is_one_line(place: Place, model: Path, texts: Path) -> None:
    hub, check = place.hub, ("check", "model=hf", "data=text_files", f"data.paths=[{texts}/*.txt]", *TINY)
    hub.model("acme/secret").private = hub.model("acme/gated").gated = True
    hub.model("acme/secret").commit(files_of(model))
    hub.model("acme/gated").commit(files_of(model))
    hub.model("acme/pickled").commit(
        {k: v for k, v in files_of(model).items() if k != "model.safetensors"} | {"a.bin": b""}
    )

    def told(path: str, *parts: str, **more: str | bool) -> None:
        line = place.refused(*check, f"model.path={path}", **more)
        assert line.startswith(f"error: model.path={path}") and all(part in line for part in parts), line

    told("acme/none", "no such path here, and no model of this name", "log in")
    told("acme/secret", "no model of this name", "log in")
    told("acme/tiny@v9", "acme/tiny has no revision v9; give a branch, tag or commit that it has")
    told("acme/gated", "is gated", f"ask for access on {hub.url}/acme/gated")
    told("acme/pickled", "only pickled weights (a.bin), which are never fetched")
    told("a--b/c", "correct the name")
    told("acme/tiny", "HF_HUB_OFFLINE is set, and the cache", "unset HF_HUB_OFFLINE", offline=True)
    told("acme/tiny", "http://127.0.0.1:9 cannot be reached", HF_ENDPOINT="http://127.0.0.1:9")
    hub.refuse = 500
    told("acme/tiny", "answers with an error (500); try again later")
    hub.refuse = 401
    told("acme/tiny", "refuses this account (401); log in")
    hub.refuse, hub.cut = None, "config.json"
    told("acme/tiny", "broke the transfer off")
    hub.cut = None
    assert "commit" in place.run(*check, "model.path=acme/tiny"), "what was half fetched is fetched again"
    assert "commit" in place.run(*check, "model.path=acme/secret", token=TOKEN)
    assert "commit" in place.run(*check, "model.path=acme/gated", token=TOKEN)
    hub.refuse = 500
    assert "commit" in place.run(*check, "model.path=acme/tiny"), "as huggingface_hub: the cache is as good"
    held = list((place.root / "hf").rglob("*.safetensors"))
    assert not held, "check fetches no weights"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_half_of_the_weights_stops_the_start_and_the_next_one_fetches_them(place: Place) -> None:
    words = ("model=hf", "model.path=acme/tiny", "data=synthetic", *RUN, "trainer.max_steps=1", "run.dir=half")
    place.hub.cut = ".safetensors"
    assert "broke the transfer off" in place.refused(*words)
    assert not (place.root / "half" / "config.yaml").exists()
    offline = place.refused(*words, offline=True)
    assert "HF_HUB_OFFLINE is set, and the cache" in offline and "does not hold it whole" in offline
    place.hub.cut = None
    assert "finished" in place.run(*words)


@pytest.mark.parametrize("path", ["acme/tiny", None])
def test_check_needs_no_torch_and_the_library_for_names_alone(place: Place, path: str | None) -> None:
    model = ["model=llama_tiny"] if path is None else ["model=hf", f"model.path={path}"]
    code = (
        f"import sys; from mgpu_pipe.cli.main import main; code = main({['check', *model, 'data=synthetic', *TINY]!r});"
        f"sys.exit(code or 'torch' in sys.modules or ('huggingface_hub' in sys.modules) != {path is not None})"
    )
    asked = {**environment(place.cache), **place.hub.environment(place.root / "hf")}
    done = subprocess.run([sys.executable, "-c", code], cwd=place.root, env=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_frozen_weights_that_are_left_out_are_those_of_the_name(place: Place) -> None:
    frozen = ("model.freeze=[model.layers.*.mlp.*]", "checkpoint.frozen_weights=leave_out")
    words = ("model=hf", "model.path=acme/tiny", "data=synthetic", *RUN, *frozen, "run.dir=left")
    place.run(*words)
    commit = place.hub.model("acme/tiny").refs["main"]
    state = json.loads((place.root / "left" / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert state["left_out"]["folder"] == f"acme/tiny@{commit}"
    other = Place(place.hub, place.root / "other", place.cache)  # a machine that has nothing of it yet
    other.root.mkdir()
    assert "exported" in other.run("export", str(place.root / "left"), "--out", "out")
    shutil.rmtree(other.root / "hf")
    gone = other.refused("export", str(place.root / "left"), "--out", "two", offline=True)
    assert f"acme/tiny@{commit} is gone; give a copy by --frozen-weights" in gone


def test_a_folder_of_the_name_wins_and_is_told(place: Place, model: Path) -> None:
    shutil.copytree(model, place.root / "acme" / "tiny")
    said = place.run("check", "model=hf", "model.path=acme/tiny", "data=synthetic", *TINY)
    assert "acme/tiny is the folder here; acme/tiny@main is what the Hub has under this name" in said
    assert not [one for one in place.hub.requests if "tiny" in one]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_rank_zero_alone_asks_and_every_node_fetches(place: Place) -> None:
    """Two nodes, each with caches of its own."""
    words = ["model=hf", "model.path=acme/tiny", "data=synthetic", *RUN, "trainer.max_steps=2", "run.dir=joined"]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(2):
        node = place.root / f"node{rank}"
        asked = {**environment(node / "cache"), **place.hub.environment(node / "hf"), **world}
        asked.update(RANK=str(rank), LOCAL_RANK="0")
        more = ["strategy=ddp", "trainer.devices=1", "trainer.num_nodes=2"]
        command = [sys.executable, "-m", "mgpu_pipe", *words, *more]
        ranks.append(subprocess.Popen(command, cwd=place.root, env=asked, stdout=-1, stderr=-1, text=True))
    for process in ranks:
        out, said = process.communicate(timeout=300)
        assert process.returncode == 0, (out[-1500:], said[-3000:])
    assert rows(place.root / "joined")[-2]["step"] == "2"
    asked_for = [one for one in place.hub.requests if "/tiny" in one]
    assert asked_for.count("GET /api/models/acme/tiny") == 1, asked_for
    weights = [one for one in asked_for if one.startswith("GET") and one.endswith("model.safetensors")]
    assert len(weights) == 2, asked_for


@pytest.mark.slow
def test_what_rank_zero_refuses_alone_ends_all_ranks_at_once(place: Place) -> None:
    """The others wait for its word of the name; without one they would, for launch.collective_timeout."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ["model=hf", "model.path=acme/nothing", "data.paths=[a]", "strategy=ddp", *TINY, "trainer.accelerator=cpu"]
    ranks = []
    for rank in "01":
        asked = {**environment(place.cache), **place.hub.environment(place.root / "hf"), **world}
        asked.update(RANK=rank, LOCAL_RANK=rank)
        ranks.append(ForkedProgram([*words, "launch.collective_timeout=3600"], place.root, asked))
    said = [rank.communicate(200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert "error: model.path=acme/nothing: " in said[0][1] and "Traceback" not in said[1][1], said


@pytest.mark.slow
def test_a_strangers_run_makes_nothing_be_fetched(place: Place, texts: Path) -> None:
    files = 'data.paths=["hf://datasets/acme/texts/data/*.txt"]'
    words = (
        "model=hf",
        "model.path=acme/tiny",
        "data=text_files",
        files,
        *RUN,
        "trainer.max_steps=1",
        "run.dir=theirs",
    )
    place.run(*words)
    mine = Place(place.hub, place.root, place.root / "my-cache")  # knows no launch of this run
    shutil.rmtree(place.root / "hf")
    place.hub.requests.clear()
    assert "data.paths" in mine.refused("eval", "theirs")
    mine.run("generate", "theirs", "--prompt", "the", "--max-new-tokens", "2")
    mine.run("eval", "theirs", f"data.paths=[{texts}/*.txt]")
    assert not [one for one in place.hub.requests if "acme" in one]
    mine.run("eval", "theirs", files)
    assert any("acme/texts" in one for one in place.hub.requests), "what the command line gives is fetched"
    assert not any("acme/tiny" in one for one in place.hub.requests)


def test_the_named_chat_templates_of_a_name_are_fetched_and_read(place: Place, model: Path) -> None:
    named = {"chat_template.jinja": b"plain", "additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    commit = place.hub.model("acme/named").commit({**files_of(model), **named})
    code = (
        "from mgpu_pipe.config.hub import local_folder\n"
        "from mgpu_pipe.data.text.tokenizer_folder import check_tokenizer, named_templates\n"
        f"folder = local_folder('acme/named@{commit}'); check_tokenizer(folder); print(named_templates(folder))"
    )
    asked = {**environment(place.cache), **place.hub.environment(place.root / "hf")}
    done = subprocess.run([sys.executable, "-c", code], env=asked, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str({"default": "plain", "tool_use": "{{ tools }}"})
