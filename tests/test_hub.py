"""Checkpoints by name, from a stand-in of the Hub that serves redirects, ETags, ranges, refusals and broken lines."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import huggingface_hub.constants
import pytest
import torch

import minibert
from minibert import BertConfig, BertForTokenClassification, CheckpointError, ConfigError
from minibert.hub import Source
from minibert.predict import TokenClassifier
from tagger import write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the folders of `root` as models `owner/name`; large files by a redirect, as the Hub does."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.private = "owner/private"
        self.break_after: list[int] = []  # bytes after which the next downloads of large files break off
        self.known = ["owner/pushed"]  # repositories that exist
        self.branches = ["main"]
        self.objects: dict[str, bytes] = {}  # large files by their SHA-256
        self.commits: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files_sent(self) -> list[str]:
        return [
            path.rsplit("/", 1)[1]
            for method, path, _ in self.requests
            if method == "GET" and ("/resolve/" in path or path.startswith("/cdn/"))
        ]


class Handler(BaseHTTPRequestHandler):
    """The few routes of the Hub that a download takes."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path, self.headers.get("Range")))
        parts = unquote(self.path.split("?")[0]).strip("/").split("/")
        if parts[0] == "cdn":
            self.send_large(self.server.root.joinpath(*parts[1:]))
            return
        if parts[:2] == ["api", "models"] and "tree" in parts:
            self.send_tree("/".join(parts[2:4]))
            return
        owner, name, _, revision, *rest = parts
        if f"{owner}/{name}" == self.server.private and self.headers.get("Authorization") != "Bearer hf_right":
            self.answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif not self.server.root.joinpath(owner, name).is_dir():
            self.answer(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        elif not self.server.root.joinpath(owner, name, *rest).is_file():
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            self.send_file(self.server.root.joinpath(owner, name, *rest))

    # The routes of an upload: make the repository, ask how each file is to be sent, send large ones, commit.

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, None))
        path = self.path.split("?")[0]
        if self.headers.get("Authorization") != "Bearer hf_right":
            self.answer_json(401, {"error": "Invalid credentials"})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'owner'}/{asked['name']}"
            status = 409 if name in self.server.known else 200
            self.server.known.append(name)
            self.answer_json(status, {"url": f"{self.server.endpoint}/{name}", "id": name, "error": "exists"})
        elif "/branch/" in path:
            self.server.branches.append(path.rsplit("/", 1)[1])
            self.answer_json(200, {})
        elif "/preupload/" in path:
            files = [{"path": f["path"], "shouldIgnore": False} for f in json.loads(body)["files"]]
            for file in files:
                file["uploadMode"] = "lfs" if file["path"].endswith(".safetensors") else "regular"
            self.answer_json(200, {"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            asked_for = json.loads(body)["objects"]
            for item in asked_for:
                item["actions"] = {"upload": {"href": f"{self.server.endpoint}/upload/{item['oid']}", "header": {}}}
            self.answer_json(200, {"transfer": "basic", "objects": asked_for})
        else:
            self.commit(path, [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(content).hexdigest() == self.path.rsplit("/", 1)[1]
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self.answer(200, {})

    def commit(self, path: str, lines: list[dict[str, Any]]) -> None:
        _, _, _, owner, name, _, branch = path.split("/")
        folder = self.server.root / owner / name
        assert branch in self.server.branches
        folder.mkdir(parents=True, exist_ok=True)
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.commits.append({**value, "branch": branch, "pull request": "create_pr=1" in self.path})
            elif line["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                (folder / value["path"]).write_bytes(self.server.objects[value["oid"]])
            else:
                assert line["key"] == "deletedFile"
                (folder / value["path"]).unlink()
        self.answer_json(
            200,
            {"commitUrl": f"{self.server.endpoint}/{owner}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
            | {"pullRequestUrl": f"{self.server.endpoint}/{owner}/{name}/discussions/1"},
        )

    def send_tree(self, name: str) -> None:
        folder = self.server.root / name
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        self.answer_json(200, [{"type": "file", "path": p.name, "size": 1, "oid": COMMIT} for p in found])

    def answer_json(self, status: int, content: Any) -> None:
        self.answer(status, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def send_file(self, path: Path) -> None:
        content = path.read_bytes()
        etag = f'"{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"'
        headers = {"X-Repo-Commit": COMMIT, "ETag": etag}
        if path.suffix in (".safetensors", ".bin"):
            linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
            # Another host, as on the Hub: a redirect within one host is followed for the file's own headers.
            location = f"http://localhost:{self.server.server_address[1]}/cdn/{path.relative_to(self.server.root)}"
            self.answer(302, {**headers, **linked, "Location": location})
        else:
            self.answer(200, headers | {"Content-Length": str(len(content))}, content)

    def send_large(self, path: Path) -> None:
        content = path.read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"Content-Length": str(len(content) - start), "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_response(206 if start else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            part = content[start:]
            if self.server.break_after:
                part = part[: self.server.break_after.pop(0)]
                self.close_connection = True
            self.wfile.write(part)
            self.wfile.flush()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    constants = huggingface_hub.constants
    old = constants.ENDPOINT
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(old, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(tmp_path / "hub")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    constants = huggingface_hub.constants
    use_endpoint(monkeypatch, server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in does not speak its protocol
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


def publish(hub: Hub, name: str = "owner/tagger") -> BertForTokenClassification:
    return write_checkpoint(hub.root / name)


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_model_is_loaded_by_name_and_only_what_is_needed_is_sent(hub: Hub, tmp_path: Path) -> None:
    model = publish(hub)
    (hub.root / "owner/tagger/pytorch_model.bin").write_bytes(b"x" * 1000)
    (hub.root / "owner/tagger/README.md").write_text("x")
    loaded = BertForTokenClassification.from_pretrained("owner/tagger", cache_dir=tmp_path / "own")
    assert same_weights(loaded, model)
    assert set(hub.files_sent()) == {"config.json", "model.safetensors"}
    assert (tmp_path / "own" / "models--owner--tagger").is_dir()


def test_the_second_time_nothing_is_sent_and_offline_nothing_is_asked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = publish(hub)
    options = {"cache_dir": tmp_path / "own"}
    TokenClassifier.from_pretrained("owner/tagger", **options)
    hub.requests.clear()
    TokenClassifier.from_pretrained("owner/tagger", **options)
    assert hub.files_sent() == []
    hub.requests.clear()
    assert same_weights(
        BertForTokenClassification.from_pretrained("owner/tagger", local_files_only=True, **options), model
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert len(TokenClassifier.from_pretrained("owner/tagger", **options).tag_characters(["张三"])[0]) == 2
    assert hub.requests == []


def test_shards_and_pickles_come_from_the_hub_too(hub: Hub, tmp_path: Path) -> None:
    model = publish(hub)
    folder = hub.root / "owner/tagger"
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    options = {"cache_dir": tmp_path / "own"}
    assert same_weights(BertForTokenClassification.from_pretrained("owner/tagger", **options), model)
    from checkpoint.test_files import as_shards

    publish(hub, "owner/sharded")
    (hub.root / "owner/sharded/model.safetensors").unlink()
    as_shards(hub.root / "owner/sharded", model.state_dict())
    assert same_weights(BertForTokenClassification.from_pretrained("owner/sharded", **options), model)
    (hub.root / "owner/sharded/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: the model owner/sharded on the Hub"):
        BertForTokenClassification.from_pretrained("owner/sharded", cache_dir=tmp_path / "another")


def test_a_broken_transfer_is_taken_up_where_it_broke(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = publish(hub)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # how much is kept at a time
    hub.break_after = [20_000, 10_000]
    loaded = BertForTokenClassification.from_pretrained("owner/tagger", cache_dir=tmp_path / "own")
    assert same_weights(loaded, model)
    ranges = [r for method, path, r in hub.requests if method == "GET" and "/cdn/" in path]
    assert len(ranges) == 3
    assert ranges[1] == "bytes=20000-"
    assert ranges[2] == "bytes=30000-"


def test_revision_and_subfolder(hub: Hub, tmp_path: Path) -> None:
    model = publish(hub, "owner/many/a/b")
    options = {"cache_dir": tmp_path / "own", "subfolder": "a/b"}
    assert same_weights(BertForTokenClassification.from_pretrained("owner/many", revision=COMMIT, **options), model)
    local = BertForTokenClassification.from_pretrained(hub.root / "owner/many", subfolder="a/b")
    assert same_weights(local, model)
    assert BertConfig.from_pretrained("owner/many", num_labels=3, **options).num_labels == 3
    assert len(TokenClassifier.from_pretrained("owner/many", **options).tag_characters(["张三"])[0]) == 2
    with pytest.raises(CheckpointError, match="owner/many: the model on the Hub has no revision 'v9'"):
        BertForTokenClassification.from_pretrained("owner/many", revision="v9", **options)


def test_a_private_model_needs_the_token(hub: Hub, tmp_path: Path) -> None:
    model = publish(hub, "owner/private")
    options = {"cache_dir": tmp_path / "own"}
    with pytest.raises(
        CheckpointError, match=r"owner/private: .* no such model on the Hub \(a private one needs token"
    ):
        BertForTokenClassification.from_pretrained("owner/private", **options)
    assert same_weights(
        BertForTokenClassification.from_pretrained("owner/private", **options, **{"token": "hf_right"}),
        model,
    )


def test_a_misspelt_path_is_not_silently_a_name_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    publish(hub)
    with pytest.raises(CheckpointError, match="owner/taggr: no such directory here, and no such model on the Hub"):
        BertForTokenClassification.from_pretrained("owner/taggr", cache_dir=tmp_path / "own")
    hub.requests.clear()
    for path in (
        "./owner/tagger",
        "/owner/tagger",
        "a/b/c",
        "owner/tagger/",
        "~/tagger",
        "",
        "a b",
        "owner/../x",
    ):
        with pytest.raises(CheckpointError, match="no such directory, and not the name of a model"):
            Source(path)
    assert hub.requests == []


def test_a_directory_comes_before_a_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_checkpoint(tmp_path / "owner" / "tagger", num_labels=3)
    publish(hub)
    monkeypatch.chdir(tmp_path)
    assert same_weights(BertForTokenClassification.from_pretrained("owner/tagger"), model)
    assert hub.requests == []


def test_what_is_not_there_is_said_in_one_line(hub: Hub, tmp_path: Path) -> None:
    (hub.root / "owner/empty").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"owner/empty/config\.json: the model owner/empty on the Hub has no such file"
    ):
        BertForTokenClassification.from_pretrained("owner/empty", cache_dir=tmp_path / "own")
    BertConfig().save_pretrained(hub.root / "owner/bare")
    with pytest.raises(CheckpointError, match=r"owner/bare: no model\.safetensors or pytorch_model\.bin"):
        BertForTokenClassification.from_pretrained("owner/bare", cache_dir=tmp_path / "own")
    with pytest.raises(ConfigError, match=r"is no directory here, and this file of it is not in the cache \(offline\)"):
        BertForTokenClassification.from_pretrained("owner/never", cache_dir=tmp_path / "own", local_files_only=True)


def test_a_server_that_cannot_be_reached_is_said_and_not_taken_for_a_missing_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr("time.sleep", lambda _: None)  # between its tries
    with pytest.raises(CheckpointError, match=r"owner/tagger: .*config\.json") as caught:
        BertForTokenClassification.from_pretrained("owner/tagger", cache_dir=tmp_path / "own")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("subfolder", ["..", "a/../../b", "/etc"])
def test_a_subfolder_may_not_lead_outside(subfolder: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="leads out of"):
        Source(str(tmp_path), subfolder=subfolder)


def test_what_is_no_name_at_all_is_a_type_error() -> None:
    wrong: Any
    for wrong in (None, 5):
        with pytest.raises(TypeError):
            minibert.BertModel.from_pretrained(wrong)


def test_the_environment_is_honoured_by_the_command(hub: Hub, tmp_path: Path) -> None:
    publish(hub)
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "minibert.cli", "predict", "--model", "owner/tagger", "张三"]
    refused = subprocess.run(command, env={**environment, "HF_HUB_OFFLINE": "1"}, capture_output=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.count(b"\n") == 1
    assert b"not in the cache (offline)" in refused.stderr
    online = subprocess.run(command, env={**environment, "HF_HUB_OFFLINE": "0"}, capture_output=True, check=False)
    assert online.returncode == 0, online.stderr
    assert (tmp_path / "home" / "hub" / "models--owner--tagger").is_dir()
    offline = subprocess.run(command, env={**environment, "HF_HUB_OFFLINE": "1"}, capture_output=True, check=False)
    assert offline.stdout == online.stdout
    assert offline.stderr == b""  # no progress bar where there is no terminal


# Uploading.

RIGHT = {"token": "hf_right"}


def test_a_model_is_pushed_and_loads_by_its_name(hub: Hub, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "local")
    loaded = BertForTokenClassification.from_pretrained(tmp_path / "local")
    url = loaded.push_to_hub("owner/fresh", **RIGHT)
    assert url == f"{hub.endpoint}/owner/fresh/commit/{COMMIT}"
    assert "owner/fresh" in hub.known
    assert [(c["summary"], c["branch"]) for c in hub.commits] == [("Upload BertForTokenClassification", "main")]
    back = BertForTokenClassification.from_pretrained("owner/fresh", cache_dir=tmp_path / "own")
    assert same_weights(back, model)
    assert back.config == loaded.config.replace(architectures=["BertForTokenClassification"])
    saved = {path.name for path in (tmp_path / "local").iterdir()}
    assert {path.name for path in (hub.root / "owner/fresh").iterdir()} == saved  # the tokeniser's files too


@pytest.mark.parametrize("sizes", [("20KB", "5GB"), ("5GB", "20KB"), ("20KB", "40KB")])
def test_weights_of_an_earlier_push_go_in_the_same_commit(sizes: tuple[str, str], hub: Hub, tmp_path: Path) -> None:
    for number, size in enumerate(sizes):
        model = write_checkpoint(tmp_path / str(number))
        model.push_to_hub("owner/pushed", max_shard_size=size, **RIGHT)
        (hub.root / "owner/pushed/README.md").write_text("mine")
    assert len(hub.commits) == 2
    back = BertForTokenClassification.from_pretrained("owner/pushed", cache_dir=tmp_path / "own")
    assert same_weights(back, model)
    model.save_pretrained(tmp_path / "expected", max_shard_size=sizes[1])
    expected = {path.name for path in (tmp_path / "expected").iterdir()}
    assert {path.name for path in (hub.root / "owner/pushed").iterdir()} == expected | {"README.md"}


def test_a_push_to_a_branch_or_as_a_pull_request(hub: Hub, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "local")
    model.push_to_hub("owner/pushed", revision="trial", commit_message="Try it", **RIGHT)
    url = model.push_to_hub("owner/pushed", create_pr=True, **RIGHT)
    assert url.endswith("/owner/pushed/discussions/1")
    assert [(c["summary"], c["branch"], c["pull request"]) for c in hub.commits] == [
        ("Try it", "trial", False),
        ("Upload BertForTokenClassification", "main", True),
    ]


def test_a_refused_push_says_so_in_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_checkpoint(tmp_path / "local")
    with pytest.raises(CheckpointError, match=r"^owner/pushed: refused by the Hub.*401.*write access") as caught:
        model.push_to_hub("owner/pushed", **{"token": "hf_wrong"})
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(CheckpointError, match=r'^a/b/c: expected the name of a model on the Hub, such as "owner/name"'):
        model.push_to_hub("a/b/c", **RIGHT)
    with pytest.raises(minibert.MinibertError, match="max_shard_size"):
        model.push_to_hub("owner/pushed", max_shard_size="0GB", **RIGHT)
    assert hub.commits == []
    monkeypatch.setattr("time.sleep", lambda _: None)  # between its tries
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(CheckpointError, match=r"^owner/pushed: could not be uploaded"):
        model.push_to_hub("owner/pushed", **RIGHT)
