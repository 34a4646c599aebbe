"""Where a checkpoint's files are: a local directory, or a model on the Hugging Face Hub."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from minibert.errors import CheckpointError, first_line
from minibert.writing import file_in, locked

DEFAULT_MODEL = Path(__file__).parent / "assets" / "default-model"  # the checkpoint that comes with the package
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # "bert-base-chinese" or "owner/name"


@dataclass(frozen=True)
class Source:
    """A checkpoint by name, whose files can be had one by one.

    Args:
        name: a directory, or the name of a model on the Hub.
        revision: branch, tag or commit on the Hub; default its main branch.
        subfolder: the folder within the directory or repository that holds the checkpoint.
        token: for private models; default the one that `hf auth login` stored.
        cache_dir: where downloads are kept; default as `HF_HOME` says.
        local_files_only: use what is in the cache and ask no server, as `HF_HUB_OFFLINE=1` does.

    Raises:
        CheckpointError: the name is no directory and cannot be a name on the Hub, or the subfolder lies outside.
    """

    name: str
    revision: str | None = None
    subfolder: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False

    def __post_init__(self) -> None:
        if os.path.lexists(self.name) and not self.is_local:
            raise CheckpointError(f"{self.name}: expected a directory or a name on the Hub, got a file or broken link")
        if not self.name or (not self.is_local and not REPOSITORY.fullmatch(self.name)):
            raise CheckpointError(
                f"{self.name or 'an empty name'}: no such directory, and not the name of a model on the Hub either"
            )
        folder = PurePosixPath(self.subfolder or "")
        if folder.is_absolute() or ".." in folder.parts:
            raise CheckpointError(f"subfolder: {self.subfolder!r} leads out of {self.name}")

    @property
    def is_local(self) -> bool:
        """Whether the name is a directory on this machine, which comes before any name on the Hub."""
        return Path(self.name).is_dir()

    @property
    def folder(self) -> Path:
        """Where the files are if the name is a directory."""
        return Path(self.name, self.subfolder or "")

    def __str__(self) -> str:
        return str(self.folder)

    def remembered(self) -> Source:
        """The same for later: valid in any working directory, and without the secret."""
        return replace(self, name=str(Path(self.name).absolute()) if self.is_local else self.name, token=None)

    @property
    def absence(self) -> str:
        """Why `fetch` gives None."""
        if self.is_local:
            return f"not in the directory {self}"
        if self._is_offline:
            return f"{self.name} is no directory here, and this file of it is not in the cache (offline)"
        return f"the model {self} on the Hub has no such file"

    @property
    def _is_offline(self) -> bool:
        from huggingface_hub import constants

        return self.local_files_only or constants.HF_HUB_OFFLINE

    def fetch(self, file_name: str) -> Path | None:
        """The local path of a file of this checkpoint, downloaded if need be; None if there is no such file.

        A download that was broken off is taken up again. A progress bar is shown on a terminal.

        Raises:
            CheckpointError: the model is not on the Hub or closed to the token, or the server cannot be reached and
                the file is not in the cache.
        """
        if not self.is_local:
            return self._download(file_name)
        try:
            return file_in(self.folder, file_name)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise CheckpointError(f"{self.folder / file_name}: cannot be read ({error.strerror})") from None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Lets no save into a local directory come between the reading of one of its files and the next."""
        with locked(self.folder, shared=True) if self.is_local else nullcontext():
            yield

    def _download(self, file_name: str) -> Path | None:
        from huggingface_hub import errors, hf_hub_download

        try:
            return Path(
                hf_hub_download(
                    self.name,
                    file_name,
                    subfolder=self.subfolder,
                    revision=self.revision,
                    token=self.token,
                    cache_dir=None if self.cache_dir is None else Path(self.cache_dir),
                    local_files_only=self.local_files_only,
                )
            )
        except errors.LocalEntryNotFoundError as error:
            if self._is_offline:
                return None
            reason = f"the Hub cannot be reached and {file_name} is not in the cache ({first_line(error)})"
        except errors.EntryNotFoundError:
            return None
        except errors.GatedRepoError:
            reason = "access has to be asked for on the Hub; then pass token or run `hf auth login`"
        except errors.RepositoryNotFoundError:
            reason = "no such directory here, and no such model on the Hub (a private one needs token)"
        except errors.RevisionNotFoundError:
            reason = f"the model on the Hub has no revision {self.revision!r}"
        except Exception as error:  # noqa: BLE001  # whatever the HTTP client makes of a bad server or a broken line
            reason = f"{file_name} could not be downloaded ({first_line(error)})"
        raise CheckpointError(f"{self.name}: {reason}")


def upload(
    folder: Path,
    name: str,
    *,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str,
    create_pr: bool,
    superseded: list[str],
) -> str:
    """Sends a folder's files to the model `name` on the Hub in one commit, and gives the commit's address.

    Args:
        superseded: patterns of files there that are deleted in the same commit unless they are sent.
        private, token, revision, commit_message, create_pr: as in `BertPreTrainedModel.push_to_hub`.
    """
    from huggingface_hub import HfApi, errors

    if not REPOSITORY.fullmatch(name):
        raise CheckpointError(f'{name}: expected the name of a model on the Hub, such as "owner/name"')
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(name, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            delete_patterns=superseded,
        )
        return str(commit.pr_url or commit.commit_url)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "; pass a token with write access or run `hf auth login`" if status in (401, 403) else ""
        raise CheckpointError(f"{name}: refused by the Hub, nothing was changed ({first_line(error)}){hint}") from None
    except Exception as error:  # noqa: BLE001  # whatever the HTTP client makes of a bad server or a broken line
        raise CheckpointError(f"{name}: could not be uploaded ({first_line(error)})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"{path}: {damage(path, error)}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise CheckpointError(f"{path}: not a JSON file, {damage(path, error)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def damage(path: Path, error: Exception) -> str:
    """Why a file cannot be read, in words for a person: what it is instead, where its first bytes tell."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError as unreadable:
        return f"cannot be read ({unreadable.strerror})"
    if size == 0:
        reason = "the file is empty"
    elif start.startswith(b"version https://git-lfs"):
        reason = "this is a Git LFS pointer; fetch the file itself with `git lfs pull`"
    elif start[:1] == b"<":
        reason = "this is an HTML page, perhaps an error page of the server it came from"
    else:
        reason = first_line(error)
    return f"incomplete or corrupt, {size:,} bytes ({reason}); download or copy it again"
