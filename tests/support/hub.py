"""A Hugging Face Hub on the loopback address: as much of its protocol as ``huggingface_hub`` speaks to read and write.

Repositories are dictionaries of files by commit. ``refuse`` and ``cut`` make it answer with errors or half a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"
LARGE = (".safetensors", ".parquet", ".bin")
_API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/([^/?]+))?(?:/(.*))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_BATCH = re.compile(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch")


@dataclass
class Repository:
    """``commits`` by their hash, oldest first; ``refs`` are branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """A new commit of these files, which ``ref`` points to."""
        content = json.dumps([len(self.commits), sorted((path, _sha(text)) for path, text in files.items())])
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha], self.refs[ref] = dict(files), sha
        return sha


@dataclass
class Hub:
    """The server's state, which a test changes at any time."""

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    refuse: int | None = None
    """Answer everything with this status."""
    cut: str | None = None
    """Send half of the files whose name ends so."""
    writers: set[str] = field(default_factory=lambda: {TOKEN})
    requests: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def model(self, name: str) -> Repository:
        return self.repositories.setdefault(("model", name), Repository())

    def dataset(self, name: str) -> Repository:
        return self.repositories.setdefault(("dataset", name), Repository())

    def environment(self, home: Path, token: str | None = None, offline: bool = False) -> dict[str, str]:
        """What points ``huggingface_hub`` here, with its cache below ``home``."""
        given = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1" if offline else "0"}
        return {**given, "HF_HUB_DISABLE_XET": "1", **({"HF_TOKEN": token} if token else {})}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def local_hub() -> Iterator[Hub]:
    """A Hub that runs as a thread of this process."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, status: int, content: object = None, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _repository(self, kind: str, name: str) -> Repository | None:
        """The repository, or the answer of who may not see it."""
        found = self.hub.repositories.get((kind, name))
        if found is None or (found.private and self._token() != TOKEN):
            self._answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        return found

    def _commit(self, repository: Repository, revision: str) -> str | None:
        sha = repository.refs.get(unquote(revision), unquote(revision))
        if sha in repository.commits:
            return sha
        self._answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        return None

    def _any(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.refuse is not None:
            self._body()
            self._answer(self.hub.refuse, {"error": "no"})
        elif self.command in ("GET", "HEAD"):
            self._read(path)
        else:
            self._write(path)

    do_GET = do_HEAD = do_POST = do_PUT = _any

    def _read(self, path: str) -> None:
        if path == "/api/whoami-v2":
            known = bool(self._token()) and self._token() in self.hub.writers | {TOKEN}
            self._answer(200 if known else 401, {"name": "tester", "type": "user", "orgs": []})
        elif found := _FILE.fullmatch(path):
            self._file(*found.groups())
        elif found := _API.fullmatch(path):
            self._about(*found.groups())
        else:
            self._answer(404, {"error": f"no such route: {path}"})

    def _about(self, kind: str, name: str, what: str | None, revision: str | None, _: str | None) -> None:
        repository = self._repository(kind, name)
        sha = None if repository is None else self._commit(repository, revision or "main")
        if repository is None or sha is None:
            return
        files = repository.commits[sha]
        if what == "tree":
            self._answer(200, [_entry(path, content) for path, content in sorted(files.items())])
        else:
            siblings = [{"rfilename": path} for path in sorted(files)]
            gated = "manual" if repository.gated else False
            about = {"_id": "1", "id": name, "sha": sha, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}
            self._answer(200, {**about, "private": repository.private, "gated": gated, "disabled": False})

    def _file(self, datasets: str | None, name: str, revision: str, path: str) -> None:
        repository = self._repository("dataset" if datasets else "model", name)
        sha = None if repository is None else self._commit(repository, revision)
        if repository is None or sha is None:
            return
        content = repository.commits[sha].get(unquote(path))
        if content is None:
            self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        elif repository.gated and self._token() != TOKEN:
            self._answer(403, {"error": "gated"}, X_Error_Code="GatedRepo", X_Repo_Commit=sha)
        else:
            begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            rest = content[int(begin[1]) if begin else 0 :]
            size = len(rest)
            if self.hub.cut is not None and path.endswith(self.hub.cut) and self.command == "GET":
                rest, self.close_connection = rest[: len(rest) // 2], True
            headers = {"ETag": f'"{_oid(path, content)}"', "X_Repo_Commit": sha, "Accept_Ranges": "bytes"}
            self._answer(206 if begin else 200, rest, Content_Length=str(size), **headers)

    def _write(self, path: str) -> None:
        body = self._body()
        if path.startswith("/upload/"):
            self.hub.blobs[path.removeprefix("/upload/")] = body
            self._answer(200, {})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif not self._token():
            self._answer(401, {"error": "Invalid username or password."})
        elif self._token() not in self.hub.writers:
            self._answer(403, {"error": "You don't have the rights to do this"})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            kind, name = asked.get("type", "model"), f"{asked['organization']}/{asked['name']}"
            if (kind, name) in self.hub.repositories:
                self._answer(409, {"error": "You already created this repo", "url": f"{self.hub.url}/{name}"})
                return
            made = self.hub.repositories[kind, name] = Repository(private=asked.get("visibility") == "private")
            made.commit({".gitattributes": b""})
            self._answer(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": "1"})
        elif _BATCH.fullmatch(path):
            self._answer(
                200, {"transfer": "basic", "objects": [self._place(one) for one in json.loads(body)["objects"]]}
            )
        elif found := _API.fullmatch(path):
            self._change(body, *found.groups())
        else:
            self._answer(404, {"error": f"no such route: {path}"})

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.hub.url}/upload/{wanted['oid']}", "header": {}}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": upload}}

    def _change(self, body: bytes, kind: str, name: str, what: str | None, revision: str | None, _: str | None) -> None:
        repository = self._repository(kind, name)
        if repository is None:
            return
        if what == "preupload":
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
            return
        assert what == "commit" and revision is not None, what
        added: dict[str, bytes] = {}
        gone: set[str] = set()
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                added[value["path"]] = self.hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                gone.add(value["path"])
        before = repository.commits[repository.refs[unquote(revision)]]
        kept = {path: content for path, content in before.items() if path not in gone}
        sha = repository.commit({**kept, **added}, unquote(revision))
        self._answer(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "oid": _oid(path, content), "size": len(content), "path": path}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": _sha(content), "size": len(content), "pointerSize": 134}
    return entry


def _oid(path: str, content: bytes) -> str:
    """What the Hub names a file by: git's hash of it, or SHA-256 where it is large."""
    if path.endswith(LARGE):
        return _sha(content)
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
